"""The PTX that converts narrow codes, run by tests/support/ptx.py over every code against the oracle; a GPU has the
last word.

It stands in for hardware that a test run does not have: tests/gpu/test_sparse.py runs the kernels themselves.
"""

import numpy as np
import pytest
import torch

from gistkit.kernels.reference import narrow
from gistkit.kernels.warp import octet_codes as ptx_of
from tests.support.ptx import halves, joined, run

KINDS = {"bf16": torch.bfloat16, "f16": torch.float16}
PATTERNS = np.arange(2**16).astype(np.uint16)
# below the upper half of an fp32: both sides of ties
LOWER_HALVES = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def shuffled(x: np.ndarray, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(x)


def oracle_codes(patterns: np.ndarray, dtype: torch.dtype, fmt: str) -> np.ndarray:
    signed = patterns.copy().view(np.int16 if patterns.dtype == np.uint16 else np.int32)
    codes = narrow.to_codes(torch.from_numpy(signed).view(dtype), fmt).numpy()
    return codes if fmt == "fp8" else codes.view(np.uint16)


@pytest.mark.parametrize("fmt", ("fp10", "fp16"))
@pytest.mark.parametrize("kind", KINDS)
def test_every_16_bit_value_becomes_the_oracles_code(kind, fmt):
    text = (ptx_of._to_fp10 if fmt == "fp10" else ptx_of._to_fp16)(kind)
    pair = (PATTERNS, shuffled(PATTERNS, 0))
    for low, high in (pair, pair[::-1]):
        made = halves(run(text, {"$1": joined(low, high)}, ["$0"])[0])
        for codes, patterns in zip(made, (low, high), strict=True):
            assert np.array_equal(codes, oracle_codes(patterns, KINDS[kind], fmt))


@pytest.mark.parametrize("kind", KINDS)
def test_every_16_bit_value_becomes_the_oracles_fp8(kind):
    four = [shuffled(PATTERNS, seed) for seed in range(4)]
    words = {"$1": joined(*four[:2]), "$2": joined(*four[2:])}
    (made,) = run(ptx_of._to_fp8(kind), words, ["$0"])
    for place, patterns in enumerate(four):
        assert np.array_equal((made >> (8 * place)) & 0xFF, oracle_codes(patterns, KINDS[kind], "fp8"))


def test_fp32_values_become_the_oracles_fp8():
    upper = np.arange(2**16, dtype=np.uint32) << 16
    four = [shuffled(np.concatenate([upper | low for low in LOWER_HALVES]), seed) for seed in range(4)]
    (made,) = run(ptx_of._to_fp8_of_fp32(), {f"${1 + i}": x for i, x in enumerate(four)}, ["$0"])
    for place, patterns in enumerate(four):
        assert np.array_equal((made >> (8 * place)) & 0xFF, oracle_codes(patterns, torch.float32, "fp8"))


@pytest.mark.parametrize("exponent", (None, 16, 119, 142, 255))
@pytest.mark.parametrize("fmt, bits, max_exponent", [("fp8", 8, 8), ("fp10", 10, 15), ("fp16", 16, 15)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_code_decodes_as_the_oracle_has_it(kind, fmt, bits, max_exponent, exponent):
    codes = np.concatenate([np.arange(2**bits), shuffled(np.arange(2**bits), 1)]).astype(np.uint16)
    if fmt == "fp8":
        words, source = codes.astype(np.uint8).view(np.uint32), 2
    else:
        # fp10's codes come six bits higher, over bits that are not defined
        low, high = (codes[i::2] << 6 | 0x2A if fmt == "fp10" else codes[i::2] for i in range(2))
        words, source = joined(low, high), 1
    inputs = {f"${source}": words}
    if exponent is not None:
        inputs[f"${source + 1}"] = np.full(words.size, (exponent - max_exponent) << 23, np.uint32)
    text = ptx_of._from_word(fmt, kind, exponent is not None)
    made = np.stack([h for word in run(text, inputs, [f"${i}" for i in range(source)]) for h in halves(word)], 1)
    signed = torch.from_numpy(codes.astype(np.uint8) if fmt == "fp8" else codes.view(np.int16))
    scale = None if exponent is None else torch.tensor([exponent], dtype=torch.uint8)
    expected = narrow.from_codes(signed, fmt, KINDS[kind], scale).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(made.ravel(), expected)
