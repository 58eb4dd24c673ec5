"""Runs straight-line PTX on numpy arrays, a lane an element: the instructions of octet_codes.py and maxima.py.

Written after the PTX ISA: a conversion or a minimum of floats gives a NaN as 0x7FFF (e4m3: 0x7F), in pairs the last
named operand is the lower half. Registers are uint32; 16-bit halves uint16; predicates bool.
"""

import re

import numpy as np
import torch

_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
_OPERAND = re.compile(r"\{[^}]*\}|[^,{\s][^,{]*")


def halves(word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper 16 bits."""
    return (word & 0xFFFF).astype(np.uint16), (word >> 16).astype(np.uint16)


def joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The word of two halves."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << 16)


def _float(word: np.ndarray) -> np.ndarray:
    return word.astype(np.uint32).view(np.float32)


def _half_value(half: np.ndarray, kind: str) -> np.ndarray:
    return _float(half.astype(np.uint32) << 16) if kind == "bf16" else half.view(np.float16).astype(np.float32)


def _torch_bits(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(x.copy()).to(dtype).view(torch.int16).numpy().view(np.uint16)


def _e4m3(x: np.ndarray) -> np.ndarray:
    """To nearest even with subnormals, clamped to 448, by products of powers of two in fp64."""
    value = np.abs(x.astype(np.float64))
    finite = np.where(np.isfinite(value), np.minimum(value, 448.0), 448.0)
    step = np.exp2(np.clip(np.floor(np.log2(np.where(finite > 0, finite, 1.0))), -6, 8) - 3)
    rounded = torch.from_numpy(np.minimum(np.rint(finite / step) * step, 448.0).astype(np.float32))
    code = rounded.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return np.where(np.isnan(x), 0x7F, code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint16)


def _from_e4m3(code: np.ndarray) -> np.ndarray:
    value = torch.from_numpy(code.astype(np.uint8)).view(torch.float8_e4m3fn).to(torch.float16)
    return np.where((code & 0x7F) == 0x7F, 0x7FFF, value.view(torch.int16).numpy().view(np.uint16)).astype(np.uint16)


def _permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Bytes by the selector's nibbles; one above 7 means the sign of its byte, eight times."""
    source = [(word >> (8 * i)) & 0xFF for word in (a, b) for i in range(4)]
    source += [np.where(octet >> 7, 0xFF, 0).astype(np.uint32) for octet in source]
    chosen = int(selector[0])
    return joined(*(source[chosen >> s & 15] | source[chosen >> (s + 4) & 15] << 8 for s in (0, 8)))


def _minimum(a: np.ndarray, b: np.ndarray, kind: str) -> np.ndarray:
    x, y = _half_value(a, kind), _half_value(b, kind)
    return np.where(np.isnan(x) | np.isnan(y), 0x7FFF, np.where(y < x, b, a)).astype(np.uint16)


def _maximum(a: np.ndarray, b: np.ndarray, kind: str) -> np.ndarray:
    """+0 is larger than -0."""
    x, y = _half_value(a, kind), _half_value(b, kind)
    larger = np.where((x > y) | ((x == y) & ~np.signbit(x)), a, b)
    return np.where(np.isnan(x) | np.isnan(y), 0x7FFF, larger).astype(np.uint16)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of bf16 in fp32, whose range is the same: rounded once as long as one of them is a power of two."""
    return _rounded((_half_value(a, "bf16") * _half_value(b, "bf16")).view(np.uint32), torch.bfloat16)


def _by_half(function, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return joined(*(function(x, y) for x, y in zip(halves(a), halves(b), strict=True)))


def _rounded(word: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return np.where(np.isnan(_float(word)), 0x7FFF, _torch_bits(_float(word), dtype)).astype(np.uint16)


def _at_least(kind: str):
    return lambda x, y: np.where(_half_value(x, kind) < _half_value(y, kind), 0, 0xFFFF).astype(np.uint16)


def _fused(kind: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of halves. Rounded to odd on the way to fp32, so that the second rounding is the only one."""
    exact = [_half_value(h, kind).astype(np.float64) for h in (a, b, c)]
    total = exact[0] * exact[1] + exact[2]
    near = total.astype(np.float32)
    word = near.view(np.uint32)
    outwards = np.where(np.abs(total) > np.abs(near.astype(np.float64)), 1, -1)
    odd = (near == total) | (word & 1 == 1) | np.isnan(total)
    return _rounded(np.where(odd, word, word + outwards.astype(np.int64)).astype(np.uint32), _DTYPES[kind])


def _fused_halves(kind: str):
    return lambda a, b, c: joined(
        *(_fused(kind, *three) for three in zip(halves(a), halves(b), halves(c), strict=True))
    )


def _minimum_32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    either = np.isnan(_float(a)) | np.isnan(_float(b))
    return np.where(either, 0x7FFFFFFF, np.minimum(_float(a), _float(b)).view(np.uint32)).astype(np.uint32)


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": _permuted,
    "selp.b32": lambda a, b, p: np.where(p, a, b).astype(np.uint32),
    "setp.geu.f32": lambda a, b: ~(_float(a) < _float(b)),
    "set.geu.u32.bf16x2": lambda a, b: _by_half(_at_least("bf16"), a, b),
    "set.geu.u32.f16x2": lambda a, b: _by_half(_at_least("f16"), a, b),
    "min.u16x2": lambda a, b: _by_half(np.minimum, a, b),
    "max.u16x2": lambda a, b: _by_half(np.maximum, a, b),
    "min.NaN.bf16x2": lambda a, b: _by_half(lambda x, y: _minimum(x, y, "bf16"), a, b),
    "max.NaN.bf16x2": lambda a, b: _by_half(lambda x, y: _maximum(x, y, "bf16"), a, b),
    "max.NaN.f16x2": lambda a, b: _by_half(lambda x, y: _maximum(x, y, "f16"), a, b),
    "fma.rn.bf16x2": _fused_halves("bf16"),
    "fma.rn.f16x2": _fused_halves("f16"),
    "min.s16x2": lambda a, b: _by_half(
        lambda x, y: np.minimum(x.view(np.int16), y.view(np.int16)).view(np.uint16), a, b
    ),
    "min.NaN.f16x2": lambda a, b: _by_half(lambda x, y: _minimum(x, y, "f16"), a, b),
    "min.NaN.f32": _minimum_32,
    "mul.rn.bf16x2": lambda a, b: _by_half(_product, a, b),
    "mul.rn.f32": lambda a, b: (_float(a) * _float(b)).view(np.uint32),
    "cvt.f32.f16": lambda a: _half_value(a, "f16").view(np.uint32),
    "cvt.rn.f16x2.f32": lambda a, b: joined(_rounded(b, torch.float16), _rounded(a, torch.float16)),
    "cvt.rn.bf16x2.f32": lambda a, b: joined(_rounded(b, torch.bfloat16), _rounded(a, torch.bfloat16)),
    "cvt.rn.satfinite.e4m3x2.f32": lambda a, b: _e4m3(_float(b)) | (_e4m3(_float(a)) << 8),
    "cvt.rn.satfinite.e4m3x2.f16x2": lambda a: (
        _e4m3(_half_value(halves(a)[0], "f16")) | (_e4m3(_half_value(halves(a)[1], "f16")) << 8)
    ),
    "cvt.rn.f16x2.e4m3x2": lambda a: joined(_from_e4m3(a & 0xFF), _from_e4m3(a >> 8)),
}


def run(text: str, inputs: dict[str, np.ndarray], outputs: list[str]) -> list[np.ndarray]:
    """The output registers after the block ``{ ... }``; inputs are uint32 arrays of one length by register name."""
    registers, length = dict(inputs), len(next(iter(inputs.values())))

    def value(operand: str) -> np.ndarray:
        if operand in registers:
            return registers[operand]
        if operand.startswith("{"):
            return joined(*(registers[part.strip()] for part in operand[1:-1].split(",")))
        number = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
        return np.full(length, number % 2**32, np.uint32)

    for instruction in text.strip()[1:-1].split(";"):
        if not instruction.strip() or instruction.strip().startswith(".reg"):
            continue
        name, operands = instruction.split(None, 1)
        target, *sources = (o.strip() for o in _OPERAND.findall(operands))
        with np.errstate(invalid="ignore", over="ignore"):
            result = INSTRUCTIONS[name](*map(value, sources))
        if target.startswith("{"):
            low, high = (part.strip() for part in target[1:-1].split(","))
            registers[low], registers[high] = halves(result)
        else:
            registers[target] = result
    return [registers[o] for o in outputs]
