"""The assembly that makes a max-pool's keys, run by tests/support/ptx.py over every 16-bit pattern."""

import numpy as np
import pytest
import torch

from gistkit.kernels.pool import maxima
from tests.support.ptx import halves, joined, run

PATTERNS = np.arange(2**16).astype(np.uint16)
LOWS = 0xE107E20A


def expected_key(patterns: np.ndarray, low: int, nan: int, dtype: torch.dtype, relu: bool) -> np.ndarray:
    """A key's high half by the rules in words: zeros equal, NaN its own pattern, the rest in the order of integers."""
    value = torch.from_numpy(patterns.view(np.int16)).view(dtype).float().numpy()
    bits = patterns.view(np.int16).astype(np.int64)
    ordered = np.where(bits < 0, -1 - (bits & 0x7FFF), bits)
    high = np.where(np.isnan(value), nan, np.where(value == 0, 0, ordered))
    if relu:
        high = np.where(value < 0, 0, high)
    return (high % 2**16 << 16 | low).astype(np.uint32)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("sm", [80, 90])
def test_keys_of_every_pattern(sm, bf16, relu):
    other = np.random.default_rng(0).permutation(PATTERNS)
    dtype = torch.bfloat16 if bf16 else torch.float16
    text = maxima._assembly.fn(bf16, relu, sm)
    nan = (maxima.NAN.value | 7, maxima.NAN.value | 30)
    constants = {"$3": np.full(2**16, LOWS, np.uint32), "$4": np.full(2**16, nan[0] | nan[1] << 16, np.uint32)}
    keys = run(text, {"$2": joined(PATTERNS, other), **constants}, ["$0", "$1"])
    for key, patterns, low, place in zip(keys, (PATTERNS, other), (LOWS & 0xFFFF, LOWS >> 16), nan, strict=True):
        assert np.array_equal(key, expected_key(patterns, low, place, dtype, relu))
    assert halves(keys[0])[0][0] == LOWS & 0xFFFF
