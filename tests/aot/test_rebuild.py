"""The rebuild kernel in machine code: no spills, wide accesses, instructions within what memory speed leaves."""

import pytest

from gistkit.formats import ceil_div
from gistkit.kernels.launch.tiling import NUM_WARPS
from gistkit.kernels.layout import FORMS
from gistkit.kernels.rebuild import rebuild as kernels
from tests.aot.harness import CAPABILITIES, INSTRUCTIONS_PER_BYTE, ITEM_BYTES, Compiled, compile_kernel, opcode_of


def build(dtype: str, capability: int, channels: int, plane: int, form="scaled", other="") -> tuple[Compiled, float]:
    """The kernel for a batch of 64, and its instructions an element, lanes that idle counted as elements missing."""
    n = 64 * channels * plane
    whole = {"plane": plane, "channels": channels, "planes": 64 * channels, "reciprocal": ceil_div(2**32, plane)}
    constexprs = {"FORM": form, "OTHER": other, "RELU": True, "KEEP_ZERO": False, "PORTABLE": False}
    if planes := kernels.planes_across(channels, plane, ITEM_BYTES[dtype]):
        kernel, rows = kernels._across_kernel, kernels.ACROSS_ROWS
        blocks = ceil_div(planes * plane, rows * 8)
        constexprs |= {"PLANES": planes, "ROWS": rows, "WHOLE": blocks == 1}
        elements = planes * plane / blocks
    else:
        kernel = kernels._rebuild_kernel
        outer, inner, step, rows, columns = kernels.shape_of(n, channels, plane, ITEM_BYTES[dtype])
        constexprs |= {"CHANNELS_INNER": plane == 1, "STEP": step, "OUTER": rows, "INNER": columns}
        constexprs |= {"WRAPS": channels % rows != 0}
        whole = {"outer": outer, "inner_steps": inner // step, "channels": channels}
        elements = rows * inner / ceil_div(inner, columns)
    values = {"x_ptr", "other_ptr", "y_ptr"}
    names = [a for a in kernel.arg_names if a.endswith("_ptr")]
    signature = {a: "*" + (dtype if a in values else "fp32") for a in names} | dict.fromkeys(whole, "i32")
    divisible = [*names, *(a for a, value in whole.items() if value % 16 == 0)]
    compiled = compile_kernel(kernel, signature, constexprs, capability, NUM_WARPS, divisible)
    return compiled, compiled.instructions * NUM_WARPS * 32 / elements


def lean(compiled: Compiled, instructions: float, dtype: str, tensors: int) -> float:
    """Instructions an element over the budget."""
    assert compiled.stack_bytes == 0
    arithmetic = [o for o in map(opcode_of, compiled.sass_lines) if o.startswith(("FADD", "FMUL", "FFMA"))]
    assert arithmetic and not any(".FTZ" in o for o in arithmetic), "subnormals survive"
    return instructions / (INSTRUCTIONS_PER_BYTE * ITEM_BYTES[dtype] * tensors)


# channels and elements of a plane (1: channels_last) as ResNet-50 has them
@pytest.mark.parametrize(("dtype", "capability", "other", "channels", "plane"), [
    ("bf16", 90, "values", 256, 3136),
    *(("bf16", c, "scaled", 256, 3136) for c in CAPABILITIES),
    ("bf16", 90, "scaled", 1024, 196),
    ("bf16", 90, "scaled", 2048, 1),
])  # fmt: skip
def test_memory_speed(dtype, capability, other, channels, plane):
    compiled, instructions = build(dtype, capability, channels, plane, other=other)
    assert lean(compiled, instructions, dtype, 3 if other else 2) <= 1


@pytest.mark.parametrize(("channels", "plane"), [(64, 12544), (1024, 196), (2048, 1)])
def test_wide_accesses(channels, plane):
    compiled, instructions = build("fp32", 90, channels, plane)
    assert lean(compiled, instructions, "fp32", 2) <= 1
    assert compiled.stores_128 == 4, "64 bytes a lane in 16-byte stores"
    assert "mul.wide" in compiled.ptx or "mul.lo.s64" in compiled.ptx, "addresses are 64-bit"


@pytest.mark.parametrize(("dtype", "other"), [("bf16", ""), ("bf16", "scaled"), ("fp32", "values")])
def test_planes_across_rows(dtype, other):
    compiled, instructions = build(dtype, 90, 2048, 49, other=other)
    assert lean(compiled, instructions, dtype, 3 if other else 2) <= 1
    assert compiled.stores == compiled.stores_128 == ITEM_BYTES[dtype]
    assert dtype == "fp32" or other or instructions <= 18, "less than a copy of 16-bit values leaves time for"


@pytest.mark.parametrize("form", FORMS)
def test_multiply_adds_are_fused_where_written(form):
    compiled, instructions = build("fp32", 90, 256, 3136, form)
    assert lean(compiled, instructions, "fp32", 2) <= 1
    elements = 16  # a lane
    assert compiled.count("FFMA") == elements + (form == "fused")
    products = {"scaled": elements, "normalised": elements, "split": 2}.get(form, 1)
    assert compiled.count("FMUL") == products
