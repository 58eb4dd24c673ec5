"""Max-pools drawn by hypothesis: any window, both layouts, every dtype, values with ties, NaN, infinities, zeros."""

from dataclasses import dataclass

import torch
from hypothesis import assume
from hypothesis import strategies as st

from gistkit.kernels.layout import flat, is_channels_last
from gistkit.kernels.ops import pool_size
from tests.support.tensors import bits, plain_nan

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECIALS = (float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-7, -1e-7, 1e-40, 1.0, 1.0, -1.0)
# those with kernels of their own
COMMON_WINDOWS = tuple(((k, k), (2, 2), (p, p)) for k, p in ((2, 0), (3, 0), (3, 1)))


@dataclass(frozen=True)
class PoolCase:
    """One pool: its input and the arguments of both operators."""

    x: torch.Tensor
    windows: tuple
    ceil_mode: bool
    relu: bool
    zero_code: bool
    bits: int

    @property
    def forward_args(self) -> tuple:
        return self.x, *self.windows, self.ceil_mode, self.relu, self.zero_code, self.bits

    def backward_args(self, grad_y: torch.Tensor, codes: torch.Tensor) -> tuple:
        shape = tuple(self.x.shape[2:])
        return grad_y, codes, *shape, *self.windows, is_channels_last(self.x), self.zero_code, self.bits

    def gradient(self, y: torch.Tensor) -> torch.Tensor:
        """A gradient for y with zeros of both signs, in the other memory layout for half of the cases."""
        grad = torch.randn(y.shape).to(y.dtype)
        grad[torch.rand(y.shape) < 0.2] = -0.0
        other = torch.channels_last if y.is_contiguous() else torch.contiguous_format
        return grad.contiguous(memory_format=other) if y.numel() % 2 else grad


def values(shape: tuple[int, ...], dtype: torch.dtype, special: float, seed: int) -> torch.Tensor:
    """Small integers (many ties), of which a share is replaced by SPECIALS."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, shape, generator=generator).to(dtype)
    picks = torch.tensor(SPECIALS).to(dtype)[torch.randint(len(SPECIALS), shape, generator=generator)]
    return torch.where(torch.rand(shape, generator=generator) < special, picks, x)


def _pair(least: int, most: int):
    return st.tuples(st.integers(least, most), st.integers(least, most))


@st.composite
def any_windows(draw) -> tuple:
    """(kernel, stride, padding) with padding of at most half the kernel."""
    kernel = draw(_pair(1, 5))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    return kernel, draw(_pair(1, 4)), padding


@st.composite
def pool_cases(draw, windows=None, max_size: int = 12) -> PoolCase:
    """A pool with at least one output a plane and no window wholly in the padding; batches may be empty."""
    drawn = draw(windows if windows is not None else any_windows() | st.sampled_from(COMMON_WINDOWS))
    ceil_mode = draw(st.booleans())
    height, width = draw(_pair(1, max_size))
    sizes = [pool_size(n, k, s, p, ceil_mode) for n, k, s, p in zip((height, width), *drawn, strict=True)]
    assume(min(sizes) >= 1)
    zero_code = draw(st.booleans())
    positions = drawn[0][0] * drawn[0][1]
    bits = draw(st.sampled_from((4, 8))) if positions <= 16 - zero_code else 8
    shape = (draw(st.integers(0, 3)), draw(st.sampled_from((1, 2, 3, 4, 8))), height, width)
    layout = draw(st.sampled_from((torch.contiguous_format, torch.channels_last)))
    special = draw(st.sampled_from((0.0, 0.1, 1.0)))
    x = values(shape, draw(st.sampled_from(DTYPES)), special, draw(st.integers(0, 2**20)))
    return PoolCase(x.contiguous(memory_format=layout), drawn, ceil_mode, draw(st.booleans()), zero_code, bits)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Shape, dtype and every bit equal, zeros' signs included, NaN payloads not."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    same = bits(plain_nan(actual.detach().cpu())) == bits(plain_nan(expected.detach().cpu()))
    assert same.all(), f"{int((~same).sum())} of {same.numel()} values differ"


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """16-bit values of any bit pattern, NaN of every payload among them; half of them from eight patterns, for ties.

    The sign is set in half of the channels, so that there a ReLU often stops whole windows.
    """
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator)
    few = torch.randint(-(2**15), 2**15, (8,), dtype=torch.int16, generator=generator)
    few[:4] = torch.tensor([0, -(2**15), 0x7FFF, -0x40]).to(torch.int16)
    picks = few[torch.randint(8, shape, generator=generator)]
    bits = torch.where(torch.rand(shape, generator=generator) < 0.5, picks, bits)
    bits[:, ::2] |= -(2**15)
    return bits.view(dtype)


def bits_named(case: PoolCase, codes: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """int16 patterns of x (16-bit) at the positions that 8-bit codes name, in the shape of ``like``; 0 for code 255."""
    (_, kw), (sh, sw), (ph, pw) = case.windows
    height, width = like.shape[2:]
    position = torch.empty_like(like, dtype=torch.uint8, device="cpu")
    flat(position).copy_(codes.cpu())
    position = position.to(torch.int64)
    rows = torch.arange(height)[:, None] * sh - ph + position // kw
    columns = torch.arange(width) * sw - pw + position % kw
    none = position == 255
    indices = (rows * case.x.shape[3] + columns).masked_fill(none, 0)
    bits = case.x.cpu().contiguous().view(torch.int16).flatten(2).gather(2, indices.flatten(2)).view(like.shape)
    return bits.masked_fill(none, 0)
