"""What the narrow formats should do, worked out in float64 from tables of their values: slow, and no bit in sight."""

import math
from functools import cache

import torch

from gistkit.formats import FloatFormat


@cache
def table(f: FloatFormat, subnormals: bool) -> torch.Tensor:
    """float64 values of the codes 0..max_code; without subnormals, the codes of such are all worth 0."""
    values = []
    for code in range(f.max_code + 1):
        exponent, mantissa = code >> f.mantissa_bits, code & ((1 << f.mantissa_bits) - 1)
        if exponent:
            values.append((1 + mantissa / 2**f.mantissa_bits) * 2.0 ** (exponent - f.bias))
        else:
            values.append(mantissa * 2.0 ** (1 - f.bias - f.mantissa_bits) if subnormals else 0.0)
    return torch.tensor(values, dtype=torch.float64)


def nearest_codes(magnitude: torch.Tensor, f: FloatFormat, subnormals: bool) -> torch.Tensor:
    """Codes of the float64 magnitudes: the nearest value, of two the one with the even code, clamped.

    Without subnormals the neighbour below the least normal is one step of the normal grid down, and stands for code 0.
    """
    grid = table(f, subnormals)
    codes = torch.arange(len(grid))
    if not subnormals:
        first = 1 << f.mantissa_bits
        below = torch.tensor([f.min_normal * (1 - 2.0 ** -(f.mantissa_bits + 1))], dtype=torch.float64)
        grid = torch.cat((below, grid[first:]))
        codes = torch.cat((torch.tensor([first - 1]), codes[first:]))
    between = (grid[1:] + grid[:-1]) / 2
    i = torch.searchsorted(between, magnitude)
    tie = between[i.clamp(max=len(between) - 1)] == magnitude
    code = torch.where(tie & (codes[i] % 2 == 1), codes[(i + 1).clamp(max=len(codes) - 1)], codes[i])
    return code if subnormals else torch.where(code < 1 << f.mantissa_bits, 0, code)


def expected_codes(x: torch.Tensor, f: FloatFormat, scale: float | None = None) -> torch.Tensor:
    """int64 codes of x; with a scale, of x / scale with subnormals kept."""
    wide = x.double() if scale is None else x.double() / scale
    code = nearest_codes(wide.abs().nan_to_num(nan=0.0), f, scale is not None)
    return torch.where(x.isnan(), f.nan_code, code) + (torch.signbit(x).long() << (f.bits - 1))


def expected_exponent(x: torch.Tensor, f: FloatFormat) -> int:
    """The exponent byte of the values in x, from the definition in docs/kernels.md."""
    finite = x[x.isfinite()].double().abs()
    largest = finite.max().item() if len(finite) else 0.0
    if largest == 0:
        return 127
    mantissa, exponent = math.frexp(largest)
    rounded = round(2 * mantissa * 2**f.mantissa_bits) / 2**f.mantissa_bits
    room = f.max_finite / 2.0**f.max_exponent
    return max(exponent - 1 + (rounded > room) + 127, f.max_exponent + 1)


def scale_of(exponent: int, f: FloatFormat) -> float:
    """What decoding multiplies by."""
    return 2.0 ** (exponent - 127 - f.max_exponent)


def boundaries(f: FloatFormat) -> torch.Tensor:
    """fp32 values of every code, the midpoints between neighbours, and the floats right beside both; both signs."""
    values = torch.cat((table(f, True), torch.tensor([f.min_normal * (1 - 2.0 ** -(f.mantissa_bits + 1))])))
    values = values.sort().values
    points = torch.cat((values, (values[1:] + values[:-1]) / 2)).float()
    beside = [torch.nextafter(points, torch.tensor(to)) for to in (0.0, torch.inf)]
    points = torch.cat((points, *beside))
    return torch.cat((points, -points))
