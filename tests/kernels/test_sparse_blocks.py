"""Sparse values packed and scaled per block at once: as in turn, and without packed values beside them."""

import pytest
import torch

from gistkit.codecs import CODECS, Sparse
from gistkit.formats import CSR_COLUMNS, ZVC_SLOT
from gistkit.kernels import ops
from gistkit.runtime.live import LiveBytes
from tests.support.tensors import bits, float_values


@pytest.mark.parametrize("fmt", ("fp16", "fp8"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_blocks_are_those_of_the_packed_values(fmt, dtype):
    """A block is 128 packed values, whichever slots they are from."""
    x = (float_values(2500, dtype, 3, 0.4, False) * torch.exp2(torch.arange(2500) // 60)).to(dtype)
    stored = bits(x) != 0
    encoded = getattr(ops, f"{fmt}_encode")(x[stored], "block")
    _, counts, scratch = ops.zvc_encode(x, "raw")
    total = int(counts.sum())
    codes, exponents = ops.compact_blocks(scratch, counts, ZVC_SLOT, total, fmt)
    assert torch.equal(codes, encoded[0]) and torch.equal(exponents, encoded[1])
    counts, columns, scratch = ops.csr_encode(x, "raw")
    close, *made = ops.csr_compact_blocks(columns, scratch, counts, total, fmt)
    assert torch.equal(close, (torch.arange(2500) % CSR_COLUMNS)[stored].to(torch.uint8))
    assert all(torch.equal(a, b) for a, b in zip(made, encoded, strict=True))


@pytest.mark.parametrize("name", ("zvc+fp8s", "zvc+fp16s", "csr+fp8s", "csr+fp16s"))
def test_settling_takes_nothing_but_the_result(name):
    codec = CODECS[name]
    assert isinstance(codec, Sparse)
    encoded = codec.begin(torch.relu(float_values(5000, torch.float32, 1, 0.3, False)))
    before, total = encoded.payload, int(codec.total(encoded))
    with LiveBytes() as live:
        codec.settle(encoded, total)
    made = [a for a in encoded.payload if not any(a is b for b in before)]
    assert codec.packing_bytes(total, torch.float32) == 0
    assert live.peak_bytes == live.current_bytes == sum(a.nbytes for a in made) > 0
