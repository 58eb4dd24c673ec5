"""Nibble kernels under Triton's interpreter against the oracle: any length, any address."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gistkit.kernels.mask import nibbles as kernels
from gistkit.kernels.reference import nibbles as reference

PROGRAM = kernels.ROWS * kernels.CODES


@settings(max_examples=30)
@given(
    n=st.integers(0, 100) | st.integers(0, 3 * PROGRAM), offset=st.sampled_from((0, 1, 2, 4)), seed=st.integers(0, 99)
)
@example(n=PROGRAM, offset=0, seed=0)
@example(n=2 * PROGRAM + 17, offset=0, seed=1)
@example(n=2 * PROGRAM + 17, offset=3, seed=2)
@example(n=PROGRAM - 1, offset=0, seed=3)
def test_kernels_equal_the_oracle(n, offset, seed):
    codes = torch.randint(0, 256, (n + offset,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)[offset:]
    packed = kernels.nibbles_pack(codes)
    assert torch.equal(packed, reference.nibbles_pack(codes))
    moved = torch.cat((packed.new_zeros(offset), packed))[offset:]
    assert torch.equal(kernels.nibbles_unpack(moved, n), codes & 15)
