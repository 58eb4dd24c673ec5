"""Mask kernels in machine code: no spills, 16-byte accesses, instructions within what memory speed leaves."""

import pytest

from gistkit.kernels.launch.tiling import NUM_WARPS, ROWS
from gistkit.kernels.mask import mask as kernels
from tests.aot.harness import (
    CAPABILITIES,
    ITEM_BYTES,
    Compiled,
    assert_lean,
    assert_wide_addresses,
    compile_kernel,
    per_element,
)

# both sizes on sm_90; test_relu has the one with the tighter budget on the others
targets = pytest.mark.parametrize("dtype", ["fp32", "bf16"])


def build(kernel, dtype: str, capability: int, **constexprs) -> tuple[Compiled, float]:
    """The kernel for tensors of dtype, and its instructions an element."""
    rows = ROWS[ITEM_BYTES[dtype]]
    types = {"x_ptr": "*" + dtype, "y_ptr": "*" + dtype, "grad_ptr": "*" + dtype, "out_ptr": "*" + dtype}
    types |= {"mask_ptr": "*u8", "scale": "fp32", "n": "i32"}
    signature = {name: types[name] for name in kernel.arg_names if name in types}
    constexprs |= {"ROWS": rows, "ALIGNED": True}
    compiled = compile_kernel(kernel, signature, constexprs, capability, NUM_WARPS)
    assert_wide_addresses(compiled)
    return compiled, per_element(compiled, rows * 8, NUM_WARPS)


@targets
def test_encode(dtype):
    compiled, instructions = build(kernels._pack_kernel, dtype, 90, RELU=False, KEEP_ZERO=False)
    assert_lean(compiled, instructions, ITEM_BYTES[dtype] + 1 / 8)
    assert compiled.loads == compiled.loads_128 == 4, "64 bytes a lane in 16-byte loads"


@pytest.mark.parametrize(
    ("capability", "dtype", "keep_zero"),
    [(90, "fp32", False), (90, "bf16", True), *((c, "bf16", False) for c in CAPABILITIES)],
)
def test_relu(capability, dtype, keep_zero):
    compiled, instructions = build(kernels._pack_kernel, dtype, capability, RELU=True, KEEP_ZERO=keep_zero)
    assert compiled.count("FMNMX") == 0, "a maximum would rewrite the payload of a NaN"
    assert_lean(compiled, instructions, 2 * ITEM_BYTES[dtype] + 1 / 8)
    assert compiled.loads == compiled.loads_128 == compiled.stores_128 == 4


@targets
def test_backward(dtype):
    compiled, instructions = build(kernels._select_kernel, dtype, 90)
    assert_lean(compiled, instructions, 2 * ITEM_BYTES[dtype] + 1 / 8)
    assert compiled.loads_128 == compiled.stores_128 == 4
    assert compiled.count("FMUL") == 0, "a gradient is selected, never multiplied"


@targets
def test_dropout_backward(dtype):
    compiled, instructions = build(kernels._scale_kernel, dtype, 90, PORTABLE=False)
    assert_lean(compiled, instructions, 2 * ITEM_BYTES[dtype] + 1 / 8)
    assert compiled.loads_128 == compiled.stores_128 == 4
    assert compiled.count("FFMA") == 0, "the product is rounded by itself"
    assert dtype != "bf16" or "cvt.rn.bf16" in compiled.ptx, "the conversion that PyTorch uses, NaN and all"


def test_flags_by_words():
    # a copy of single bytes is as fast as memory only with few instructions: half of what an H200 issues on the way
    types, rows = {"words_ptr": "*i32", "mask_ptr": "*i16", "n": "i32"}, kernels.FLAG_ROWS
    compiled = compile_kernel(kernels._pack_flags_kernel, types, {"ROWS": rows}, 90, NUM_WARPS)
    assert_wide_addresses(compiled)
    assert_lean(compiled, per_element(compiled, rows * kernels.FLAGS, NUM_WARPS), (1 + 1 / 8) / 2)
    assert compiled.loads == compiled.loads_128 == 4
