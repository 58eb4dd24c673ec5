"""Nibble kernels on a CUDA device against the oracle on CPU tensors."""

import pytest
import torch

from gistkit.kernels import ops
from tests.gpu.waiting import no_synchronisation

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 16])
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 1000, 2**13, 2**13 + 1, 2**20 + 30, 3_000_001])
def test_kernels_equal_the_oracle(n, offset):
    codes = torch.randint(0, 256, (n + offset,), generator=torch.Generator().manual_seed(n)).to(torch.uint8)
    packed = ops.nibbles_pack(codes.cuda()[offset:])
    assert torch.equal(packed.cpu(), ops.nibbles_pack(codes[offset:]))
    moved = torch.cat((packed.new_zeros(offset), packed))[offset:]
    assert torch.equal(ops.nibbles_unpack(moved, n).cpu(), codes[offset:] & 15)


def test_the_host_never_waits():
    codes = torch.ones(100_000, dtype=torch.uint8, device="cuda")
    ops.nibbles_unpack(ops.nibbles_pack(codes), 100_000)
    torch.cuda.synchronize()
    with no_synchronisation():
        ops.nibbles_unpack(ops.nibbles_pack(codes), 100_000)
