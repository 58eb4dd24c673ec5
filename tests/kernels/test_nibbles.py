"""Two codes a byte: the layout, any length, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.kernels import ops


@settings(max_examples=40)
@given(st.lists(st.integers(0, 15), max_size=50))
def test_codes_come_back_from_nibbles_low_first(codes):
    x = torch.tensor(codes, dtype=torch.uint8)
    packed = ops.nibbles_pack(x)
    padded = [*codes, 0]
    assert packed.tolist() == [padded[i] + 16 * padded[i + 1] for i in range(0, len(codes), 2)]
    assert torch.equal(ops.nibbles_unpack(packed, len(codes)), x)


def test_four_bits_of_a_code_are_kept():
    assert ops.nibbles_pack(torch.tensor([0xF3, 0xE5, 0xD7], dtype=torch.uint8)).tolist() == [0x53, 0x07]


@pytest.mark.parametrize("n", [0, 1, 18, 33])
def test_operators_are_well_formed(n):
    x = torch.arange(n, dtype=torch.uint8)
    torch.library.opcheck(torch.ops.gistkit.nibbles_pack.default, (x,))
    torch.library.opcheck(torch.ops.gistkit.nibbles_unpack.default, (ops.nibbles_pack(x), n))


def test_bad_arguments():
    x = torch.zeros(4, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"nibbles_pack: codes must be 1-D and contiguous, got shape \(4, 4\)"):
        ops.nibbles_pack(x)
    with pytest.raises(TypeError, match=r"nibbles_pack: codes must be of dtype torch.uint8, got torch.int32"):
        ops.nibbles_pack(x.view(-1).to(torch.int32))
    with pytest.raises(ValueError, match=r"nibbles_unpack: packed must have 8 elements to match 15 codes, got 16"):
        ops.nibbles_unpack(x.view(-1), 15)
    with pytest.raises(TypeError, match=r"nibbles_unpack: packed must be of dtype torch.uint8, got torch.int8"):
        ops.nibbles_unpack(x.view(-1).view(torch.int8), 32)
