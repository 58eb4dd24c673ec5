"""Narrow-float kernels in machine code: no spills, no flush to zero, instructions within what memory speed leaves."""

import pytest

from gistkit.kernels.launch.tiling import NUM_WARPS, ROWS
from gistkit.kernels.narrow import fp10, tensor_scale
from gistkit.kernels.narrow import narrow as kernels
from tests.aot.harness import CAPABILITIES, Compiled, compile_kernel, loop_body, per_element

# An H200 moves 4.3 TB/s and issues instructions for about 6.8 of them per byte moved (34 for fp32 to fp8: 5 bytes).
INSTRUCTIONS_PER_BYTE = 6.8
ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
CODES = {"fp16": ("*i16", 2), "fp8": ("*u8", 1)}
# every dtype on sm_90, and the one with the tightest budget on the others
targets = pytest.mark.parametrize(
    ("capability", "dtype"), [(90, "fp32"), (90, "bf16"), (90, "fp16")] + [(c, "bf16") for c in CAPABILITIES if c != 90]
)
formats = pytest.mark.parametrize("fmt", CODES)


def build(kernel, dtype: str, fmt: str, capability: int, ragged: bool = False, **constexprs) -> Compiled:
    types = {"x_ptr": "*" + dtype, "codes_ptr": CODES.get(fmt, ("*u8", 1))[0], "words_ptr": "*i32", "amax_ptr": "*i32"}
    types |= {"exponent_ptr": "*u8", "exponents_ptr": "*u8", "n": "i32", "words": "i32", "stretches": "i32"}
    signature = {name: types[name] for name in kernel.arg_names if name in types}
    # as the launcher specialises: lengths of activations are multiples of 16, and fp10's planes always are
    aligned = ("x_ptr", "codes_ptr", "words_ptr", "n", "words", "amax_ptr", "stretches")
    divisible = [name for name in aligned if name in signature and not (ragged and name == "n")]
    return compile_kernel(kernel, signature, constexprs, capability, NUM_WARPS, divisible)


def assert_lean(compiled: Compiled, instructions: float, bytes_moved: float) -> None:
    assert compiled.spills == 0 and compiled.stack_bytes == 0
    assert not any(".FTZ" in line for line in compiled.sass_lines), "subnormals survive"
    assert instructions <= INSTRUCTIONS_PER_BYTE * bytes_moved


@targets
@formats
@pytest.mark.parametrize("scaled", [False, True])
def test_unscaled_and_per_tensor(capability, dtype, fmt, scaled):
    rows = ROWS[ITEM_BYTES[dtype]]
    moved = ITEM_BYTES[dtype] + CODES[fmt][1]
    constexprs = {"FMT": fmt, "ROWS": rows, "ALIGNED": True}
    level = {"ASM": capability}
    kernel = kernels._tensor_encode_kernel if scaled else kernels._encode_kernel
    encode = build(kernel, dtype, fmt, capability, **constexprs, **level)
    assert_lean(encode, per_element(encode, rows * 8, NUM_WARPS), moved)
    assert encode.loads == encode.loads_128 == (6 if scaled else 4), "64 bytes a lane of values, and 32 of maxima"
    constexprs |= {"SCALED": scaled}
    decode = build(kernels._decode_kernel, dtype, fmt, capability, **constexprs)
    assert_lean(decode, per_element(decode, rows * 8, NUM_WARPS), moved)
    assert decode.stores_128 == 4


@targets
@formats
def test_per_block(capability, dtype, fmt):
    rows = kernels.BLOCK_ROWS
    moved = ITEM_BYTES[dtype] + CODES[fmt][1]
    constexprs = {"FMT": fmt, "ROWS": rows, "ASM": capability, "ALIGNED": True}
    encode = build(kernels._block_encode_kernel, dtype, fmt, capability, **constexprs)
    assert_lean(encode, per_element(encode, rows * 128, NUM_WARPS), moved)
    assert encode.loads == encode.loads_128, "one pass over the values, in 16-byte loads"
    decode = build(kernels._block_decode_kernel, dtype, fmt, capability, FMT=fmt, ROWS=rows)
    assert_lean(decode, per_element(decode, rows * 128, NUM_WARPS), moved)


@targets
def test_maxima(capability, dtype):
    block = tensor_scale.AMAX_BLOCK[ITEM_BYTES[dtype]]
    compiled = build(tensor_scale._amax_kernel, dtype, "", capability, BLOCK=block, ALIGNED=True)
    assert_lean(compiled, per_element(loop_body(compiled), block, NUM_WARPS), ITEM_BYTES[dtype])
    assert compiled.loads == compiled.loads_128 == 4


@targets
@pytest.mark.parametrize("scaling", ["none", "tensor", "block"])
def test_fp10(capability, dtype, scaling):
    size = ITEM_BYTES[dtype]
    encode = build(fp10._pack10_kernel, dtype, "fp10", capability, SCALING=scaling, ROWS=fp10.ENCODE_ROWS)
    elements = 3 * 128 * fp10.ENCODE_ROWS
    assert_lean(encode, per_element(encode, elements, NUM_WARPS), size + 4 / 3)
    decode = build(fp10._unpack10_kernel, dtype, "fp10", capability, SCALING=scaling, ROWS=fp10.DECODE_ROWS)
    elements = 3 * 128 * fp10.DECODE_ROWS
    assert_lean(decode, per_element(decode, elements, NUM_WARPS), size + 4 / 3)
    assert encode.loads == encode.loads_128, "one pass over the values, 16 bytes a lane"
    assert decode.stores == decode.stores_128


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("scaling, instructions", [("tensor", 12), ("block", 15.5)])
def test_fp10_of_pairs(capability, scaling, instructions):
    constexprs = {"SCALING": scaling, "ASM": capability, "ROWS": fp10.ENCODE_ROWS}
    encode = build(fp10._pack10_pairs_kernel, "bf16", "fp10", capability, **constexprs)
    assert encode.spills == encode.stack_bytes == 0
    assert per_element(encode, 3 * 128 * fp10.ENCODE_ROWS, NUM_WARPS) <= instructions
    assert encode.loads == encode.loads_128 and encode.stores_128 == 4


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["none", "tensor", "block", "maxima"])
def test_whole_tiles_of_any_length_are_accessed_wide(dtype, kind):
    """Packed values number anything; only the last tile goes item by item."""
    if kind == "maxima":
        kernel, constexprs = tensor_scale._amax_kernel, {"BLOCK": tensor_scale.AMAX_BLOCK[ITEM_BYTES[dtype]]}
    else:
        kernel = {"none": kernels._encode_kernel, "tensor": kernels._tensor_encode_kernel}.get(
            kind, kernels._block_encode_kernel
        )
        rows = kernels.BLOCK_ROWS if kind == "block" else ROWS[ITEM_BYTES[dtype]]
        constexprs = {"FMT": "fp16", "ROWS": rows, "ASM": 90}
    compiled = build(kernel, dtype, "fp16", 90, ragged=True, **constexprs, ALIGNED=False)
    wide = 8 if kind == "block" and dtype == "fp32" else 4
    assert compiled.spills == 0 and compiled.loads_128 - 2 * (kind == "tensor") == wide
    assert kind == "maxima" or compiled.stores_128 == (2 if kind != "block" and dtype == "fp32" else 4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_fp8_by_the_hardware(dtype, aligned, scaled):
    kernel = kernels._tensor_encode_kernel if scaled else kernels._encode_kernel
    constexprs = {"FMT": "fp8", "ROWS": ROWS[ITEM_BYTES[dtype]], "ALIGNED": aligned, "ASM": 90}
    compiled = build(kernel, dtype, "fp8", 90, **constexprs)
    paths = 1 if aligned else 2
    assert compiled.count("F2FP.SATFINITE.E4M3") == paths * ROWS[ITEM_BYTES[dtype]] * 8 // (NUM_WARPS * 32) // 2
    assert compiled.spills == 0 and (not aligned or per_element(compiled, constexprs["ROWS"] * 8, NUM_WARPS) <= 13)
