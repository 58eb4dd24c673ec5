"""Narrow-float kernels in machine code: no spills, no flush to zero, instructions within what memory speed leaves."""

import pytest

from gistkit.kernels.launch.tiling import NUM_WARPS, ROWS
from gistkit.kernels.narrow import narrow as kernels
from tests.aot.harness import ITEM_BYTES, Compiled, assert_lean, assert_wide_addresses, compile_kernel, per_element

CODES = {"fp16": ("*i16", 2), "fp8": ("*u8", 1)}


def build(kernel, dtype: str, fmt: str, capability: int, ragged: bool = False, **constexprs) -> Compiled:
    types = {"x_ptr": "*" + dtype, "codes_ptr": CODES.get(fmt, ("*u8", 1))[0], "words_ptr": "*i32"}
    types |= {"exponents_ptr": "*u8", "n": "i32", "words": "i32"}
    signature = {name: types[name] for name in kernel.arg_names if name in types}
    # as the launcher specialises: lengths of activations are multiples of 16, and fp10's planes always are
    aligned = ("x_ptr", "codes_ptr", "words_ptr", "n", "words")
    divisible = [name for name in aligned if name in signature and not (ragged and name == "n")]
    compiled = compile_kernel(kernel, signature, constexprs, capability, NUM_WARPS, divisible)
    assert_wide_addresses(compiled)
    return compiled


def shape(dtype: str, fmt: str, scaled: bool) -> dict:
    """Constants of both kernels of an unpacked format."""
    rows, columns = (kernels.BLOCK_ROWS, 128) if scaled else (ROWS[ITEM_BYTES[dtype]], 8)
    return {"FMT": fmt, "SCALED": scaled, "ROWS": rows, "COLUMNS": columns}


@pytest.mark.parametrize(
    ("capability", "dtype", "fmt", "scaled"),
    [(90, "fp32", "fp16", False), (90, "bf16", "fp16", False), (90, "fp16", "fp8", False), (90, "fp32", "fp8", True),
     (80, "bf16", "fp8", True), (100, "bf16", "fp8", True)],
)  # fmt: skip
def test_encode_and_decode(capability, dtype, fmt, scaled):
    constexprs, moved = shape(dtype, fmt, scaled), ITEM_BYTES[dtype] + CODES[fmt][1]
    elements = constexprs["ROWS"] * constexprs["COLUMNS"]
    encode = build(kernels._encode_kernel, dtype, fmt, capability, **constexprs, ASM=capability, ALIGNED=True)
    assert_lean(encode, per_element(encode, elements, NUM_WARPS), moved)
    assert encode.loads == encode.loads_128, "one pass over the values, in 16-byte loads"
    decode = build(kernels._decode_kernel, dtype, fmt, capability, **constexprs)
    assert_lean(decode, per_element(decode, elements, NUM_WARPS), moved)
    assert decode.stores == decode.stores_128


@pytest.mark.parametrize(
    ("capability", "dtype", "scaling"),
    [(90, "fp32", "block"), (90, "bf16", "none"), (80, "bf16", "block"), (100, "bf16", "block")],
)
def test_fp10(capability, dtype, scaling):
    size = ITEM_BYTES[dtype]
    encode = build(kernels._pack10_kernel, dtype, "fp10", capability, SCALING=scaling, ROWS=kernels.ENCODE_ROWS)
    assert_lean(encode, per_element(encode, 3 * 128 * kernels.ENCODE_ROWS, NUM_WARPS), size + 4 / 3)
    decode = build(kernels._unpack10_kernel, dtype, "fp10", capability, SCALING=scaling, ROWS=kernels.DECODE_ROWS)
    assert_lean(decode, per_element(decode, 3 * 128 * kernels.DECODE_ROWS, NUM_WARPS), size + 4 / 3)
    assert encode.loads == encode.loads_128, "one pass over the values, 16 bytes a lane"
    assert decode.stores == decode.stores_128


@pytest.mark.parametrize("scaled", [False, True])
def test_whole_tiles_of_any_length_are_accessed_wide(scaled):
    """Packed values number anything; only the last tile goes item by item."""
    constexprs = shape("bf16", "fp16", scaled)
    compiled = build(kernels._encode_kernel, "bf16", "fp16", 90, ragged=True, **constexprs, ASM=90, ALIGNED=False)
    assert compiled.stack_bytes == 0 and compiled.loads_128 == compiled.stores_128 == 4


@pytest.mark.parametrize(("dtype", "aligned"), [("fp32", True), ("bf16", False)])
def test_fp8_by_the_hardware(dtype, aligned):
    constexprs = shape(dtype, "fp8", False)
    compiled = build(kernels._encode_kernel, dtype, "fp8", 90, not aligned, **constexprs, ASM=90, ALIGNED=aligned)
    paths = 1 if aligned else 2
    assert compiled.count("F2FP.SATFINITE.E4M3") == paths * ROWS[ITEM_BYTES[dtype]] * 8 // (NUM_WARPS * 32) // 2
    assert not aligned or per_element(compiled, constexprs["ROWS"] * 8, NUM_WARPS) <= 13
