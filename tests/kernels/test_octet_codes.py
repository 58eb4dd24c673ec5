"""The PTX that converts to fp8, run by tests/support/ptx.py over every 16-bit value against the oracle; a GPU has the
last word.

It stands in for hardware that a test run does not have: tests/gpu/test_sparse.py runs the kernels themselves.
"""

import numpy as np
import pytest
import torch

from gistkit.formats import FLOAT_FORMATS
from gistkit.kernels.reference import narrow
from gistkit.kernels.warp.octet_codes import _to_fp8
from tests.support.ptx import joined, run

KINDS = {"bf16": torch.bfloat16, "f16": torch.float16}
PATTERNS = np.arange(2**16).astype(np.uint16)


@pytest.mark.parametrize("exponent", (None, 9, 100, 127, 142, 200, 255))
@pytest.mark.parametrize("kind", KINDS)
def test_every_16_bit_value_becomes_the_oracles_fp8(kind, exponent):
    """Unscaled (None), and under this exponent byte."""
    four = [np.random.default_rng(seed).permutation(PATTERNS) for seed in range(4)]
    inputs = {"$1": joined(*four[:2]), "$2": joined(*four[2:])}
    if exponent is not None:
        inputs |= {f"${3 + i}": np.full(2**16, (8 + 254 - exponent) << 23, np.uint32) for i in range(4)}
    (made,) = run(_to_fp8(kind, exponent is not None), inputs, ["$0"])
    for place, patterns in enumerate(four):
        x = torch.from_numpy(patterns.view(np.int16)).view(KINDS[kind])
        if exponent is None:
            expected = narrow.to_codes(x, "fp8")
        else:
            expected = narrow._scaled_codes(x, torch.tensor([exponent]), FLOAT_FORMATS["fp8"])
        assert np.array_equal((made >> (8 * place)) & 0xFF, expected.numpy())
