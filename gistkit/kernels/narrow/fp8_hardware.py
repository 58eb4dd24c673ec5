"""``fp8`` codes by the hardware's conversion to e4m3 (sm_89 on), four elements at a time.

``cvt.rn.satfinite`` rounds to nearest even with subnormals kept and clamps infinities, which is the scaled form; for
the unscaled one see :mod:`gistkit.kernels.warp.octet_codes`. NaN comes out as 0x7F, so the sign is put in as a bit. To
the bit what :mod:`gistkit.kernels.narrow.rounding` gives, in 8.8 instructions an element in place of 17.0 (bf16, a
scale per block, sm_90) and 5.0 in place of 13.8 (unscaled).
"""

from __future__ import annotations

import triton
import triton.language as tl

from gistkit.kernels.warp.octet_codes import FP8_BF16, FP8_F16, FP8_FP32

_WIDEN = {
    "bf16": "shl.b32 a, $1, 16; and.b32 b, $1, 0xFFFF0000; shl.b32 c, $2, 16; and.b32 d, $2, 0xFFFF0000; ",
    "fp16": "mov.b32 {p, q}, $1; cvt.f32.f16 a, p; cvt.f32.f16 b, q; "
    "mov.b32 {p, q}, $2; cvt.f32.f16 c, p; cvt.f32.f16 d, q; ",
    "fp32": "mov.b32 a, $1; mov.b32 b, $2; mov.b32 c, $3; mov.b32 d, $4; ",
}
_SIGNS = {
    2: "prmt.b32 b, $1, $2, 0x7531; and.b32 b, b, 0x80808080; ",
    4: "prmt.b32 b, $1, $2, 0x0073; prmt.b32 c, $3, $4, 0x7300; and.b32 b, b, 0x8080; and.b32 c, c, 0x80800000; "
    "or.b32 b, b, c; ",
}


def _scaled(kind: str) -> str:
    """PTX: $0 = four codes of the elements in the first registers, each times its factor in the last four."""
    registers = 4 if kind == "fp32" else 2
    text = "{ .reg .b32 a, b, c, d; .reg .b16 p, q; " + _WIDEN[kind]
    for i, register in enumerate("abcd"):
        text += f"mul.rn.f32 {register}, {register}, ${1 + registers + i}; "
    text += "cvt.rn.satfinite.e4m3x2.f32 p, b, a; cvt.rn.satfinite.e4m3x2.f32 q, d, c; mov.b32 a, {p, q}; "
    return text + _SIGNS[registers] + "or.b32 $0, a, b; }"


_BF16, _FP16, _FP32 = (tl.constexpr(_scaled(kind)) for kind in ("bf16", "fp16", "fp32"))


@triton.jit
def hardware_codes(x, factor, SCALED: tl.constexpr):
    """uint8 fp8 codes of x fp32/bf16/fp16, of whose last axis a lane holds a multiple of 4; times factor if SCALED."""
    if x.dtype == tl.float32:
        if SCALED:
            return tl.inline_asm_elementwise(_FP32, "=r,r,r,r,r,r,r,r,r", [x, factor], tl.uint8, is_pure=True, pack=4)
        else:
            return tl.inline_asm_elementwise(FP8_FP32, "=r,r,r,r,r", [x], tl.uint8, is_pure=True, pack=4)
    else:
        if SCALED:
            scaled: tl.constexpr = _BF16 if x.dtype == tl.bfloat16 else _FP16
            return tl.inline_asm_elementwise(scaled, "=r,r,r,r,r,r,r", [x, factor], tl.uint8, is_pure=True, pack=4)
        else:
            unscaled: tl.constexpr = FP8_BF16 if x.dtype == tl.bfloat16 else FP8_F16
            return tl.inline_asm_elementwise(unscaled, "=r,r,r", [x], tl.uint8, is_pure=True, pack=4)
