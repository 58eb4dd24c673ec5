"""Operands of the rebuild kernel: images, statistics and factors, in both layouts."""

import torch

from tests.support.tensors import values_of

# Images, channels, elements of a plane, as few as give several programs: planes shorter and longer than one, whole and
# odd rows of 8; of the last line rows of 8 lie across the planes' ends, several planes a program or several
# programs a group of planes.
SIZES = (
    *((2, 3, 1), (1, 1, 1), (3, 5, 7), (2, 8, 196), (1, 2, 4100), (1, 2, 3136), (4, 300, 1), (9, 7, 1), (2, 6, 49)),
    *((2, 64, 49), (3, 8, 9), (1, 24, 169), (2, 8, 261)),
)


def factors(channels: int, seed: int) -> list[torch.Tensor]:
    """mean, 1/std, weight and bias."""
    g = torch.Generator().manual_seed(seed)
    mean, invstd, weight, bias = (torch.randn(channels, generator=g) for _ in range(4))
    return [mean, invstd.abs() + 0.1, weight, bias]


def operands(size: tuple[int, int, int], dtype: torch.dtype, seed: int) -> tuple:
    """(x, other, norm, norm of other) of N * C * plane elements."""
    n, channels, plane = size
    count = n * channels * plane
    g = torch.Generator().manual_seed(seed)
    x, other = (torch.randn(count, generator=g).to(dtype) for _ in range(2))
    # a few special values: NaN, infinities, zeros of both signs, subnormals
    special = values_of(count, dtype, 2 * seed, 0.0, False)
    x = torch.where(torch.rand(count, generator=g) < 0.05, special, x)
    return x, other, factors(channels, seed + 1), factors(channels, seed + 2)
