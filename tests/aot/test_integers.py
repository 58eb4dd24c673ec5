"""Integer kernels in machine code: no spills, no flush to zero, wide accesses, instructions within their budgets."""

import pytest

from gistkit.kernels.launch.tiling import NUM_WARPS
from gistkit.kernels.narrow import integers as kernels
from tests.aot.harness import ITEM_BYTES, assert_wide_addresses, compile_kernel, opcode_of, per_element

MOST = {"encode": {"fp32": 21, "bf16": 17.5, "fp16": 17.5}, "decode": {"fp32": 9.5, "bf16": 13.5, "fp16": 9.6}}
"""Instructions an element; an H200 issues about 36 in the time that fp32 takes to come and go, 18 for 16 bits."""


def build(kernel, dtype: str, bits: int, capability: int, aligned: bool = True):
    types = {"x_ptr": "*" + dtype, "units_ptr": "*i16" if bits == 4 else "*u8", "lows_ptr": "*fp32"}
    types |= {"steps_ptr": "*fp32", "n": "i32", "seed": "fp32"}
    signature = {name: types[name] for name in kernel.arg_names if name in types}
    divisible = [name for name in signature if name.endswith("_ptr") or (name == "n" and aligned)]
    constexprs = {"BITS": bits, "ROWS": kernels.ROWS[ITEM_BYTES[dtype]], "ALIGNED": aligned}
    compiled = compile_kernel(kernel, signature, constexprs, capability, NUM_WARPS, divisible)
    assert_wide_addresses(compiled)
    return compiled


@pytest.mark.parametrize(
    "dtype, bits, capability", [("fp32", 4, 90), ("bf16", 4, 80), ("bf16", 2, 100), ("fp16", 2, 90)]
)
def test_encode_and_decode(dtype, bits, capability):
    elements = kernels.ROWS[ITEM_BYTES[dtype]] * 256
    encode, decode = (build(k, dtype, bits, capability) for k in (kernels._encode_kernel, kernels._decode_kernel))
    for compiled, (name, most) in zip((encode, decode), MOST.items(), strict=True):
        assert compiled.stack_bytes == 0
        assert ".ftz" not in compiled.ptx and "div.rn.f32" in encode.ptx, "subnormals survive"
        assert "fma" not in compiled.ptx, "every operation rounds by itself"
        # without what it calls: the division's way for a span next to fp32's ends
        last = max(i for i, line in enumerate(compiled.sass_lines) if opcode_of(line) == "EXIT")
        assert per_element(compiled.sass_lines[: last + 1], elements) <= most[dtype], name
    assert encode.loads == encode.loads_128 == 4, "one pass over the values, 64 bytes a lane"
    assert decode.stores == decode.stores_128 == 4


def test_whole_tiles_of_any_length_are_read_wide():
    """Only the last tile goes item by item."""
    encode = build(kernels._encode_kernel, "bf16", 4, 90, aligned=False)
    assert encode.stack_bytes == 0 and encode.loads_128 == 4
