"""The packed PTX of bf16 to scaled fp10, run by tests/support/ptx.py over every pattern against the oracle.

It stands in for hardware that a test run does not have: tests/gpu/test_narrow.py runs the kernels themselves.
"""

import numpy as np
import pytest
import torch

from gistkit.formats import FP10
from gistkit.kernels.reference import narrow
from gistkit.kernels.warp import pair_codes as ptx_of
from tests.support.ptx import halves, joined, run

MAGNITUDES = np.arange(2**15).astype(np.uint16)
OTHERS = np.random.default_rng(0).permutation(MAGNITUDES)


@pytest.mark.parametrize("exponent", (16, 17, 100, 110, 126, 127, 128, 142, 143, 200, 254))
def test_every_magnitude_becomes_the_oracles_code(exponent):
    factor = np.full(2**15, ((15 + 254 - exponent) << 7) * 0x10001, np.uint32)
    for low, high in ((MAGNITUDES, OTHERS), (OTHERS, MAGNITUDES)):
        (made,) = run(ptx_of._CODES.value, {"$1": joined(low, high), "$2": factor}, ["$0"])
        for codes, patterns in zip(halves(made), (low, high), strict=True):
            x = torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16)
            expected = narrow._scaled_codes(x, torch.tensor(exponent, dtype=torch.uint8), FP10)
            assert np.array_equal(codes.view(np.int16), expected.numpy())


def test_infinities_and_nan_are_no_maxima():
    (finite,) = run(ptx_of._FINITE.value, {"$1": joined(MAGNITUDES, OTHERS)}, ["$0"])
    for got, patterns in zip(halves(finite), (MAGNITUDES, OTHERS), strict=True):
        assert np.array_equal(got, np.where(patterns >= 0x7F80, 0x7FFF, patterns))
    (larger,) = run("{" + ptx_of._LARGER.value + "}", {"$1": finite, "$2": joined(OTHERS, MAGNITUDES)}, ["$0"])
    # what is not finite on the left has lost; on the right it is as it was, and a NaN there has lost too
    left, right = (np.where(p >= 0x7F80, -1, p.astype(np.int64)) for p in (MAGNITUDES, OTHERS))
    right = np.where(OTHERS == 0x7F80, 0x7F80, right)
    expected = np.maximum(left, right)
    assert np.array_equal(halves(larger)[0], np.where(expected < 0, 0x7FFF, expected))
