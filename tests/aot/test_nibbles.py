"""Nibble kernels in machine code: wide accesses, and half of what an H200 issues while a copy moves their bytes."""

import pytest

from gistkit.kernels.launch.tiling import NUM_WARPS
from gistkit.kernels.mask import nibbles as kernels
from tests.aot.harness import CAPABILITIES, compile_kernel, per_element

INSTRUCTIONS_PER_BYTE = 6.8


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kernel", [kernels._pack_nibbles_kernel, kernels._unpack_nibbles_kernel])
def test_codes_by_words(kernel, capability):
    signature = {"codes_ptr": "*u8", "packed_ptr": "*u8", "n": "i32"}
    signature = {name: signature[name] for name in kernel.arg_names if name in signature}
    constexprs = {"ROWS": kernels.ROWS, "WORDS": True}
    compiled = compile_kernel(kernel, signature, constexprs, capability, NUM_WARPS)
    assert compiled.spills == compiled.stack_bytes == compiled.barriers == 0
    assert per_element(compiled, kernels.ROWS * kernels.CODES, NUM_WARPS) <= INSTRUCTIONS_PER_BYTE * 1.5 / 2
    pack = kernel is kernels._pack_nibbles_kernel
    assert (compiled.loads_128 if pack else compiled.stores_128) == 4, "64 bytes of codes a lane"
    assert compiled.count("STG.E.64" if pack else "LDG.E.64") == 4, "and 32 of nibbles"


@pytest.mark.parametrize("kernel", [kernels._pack_nibbles_kernel, kernels._unpack_nibbles_kernel])
def test_codes_one_by_one_spill_nothing(kernel):
    signature = {name: "i32" if name == "n" else "*u8" for name in kernel.arg_names[:3]}
    compiled = compile_kernel(kernel, signature, {"ROWS": kernels.ROWS, "WORDS": False}, 90, NUM_WARPS, ())
    assert compiled.spills == compiled.stack_bytes == 0
