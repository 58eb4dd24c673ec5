"""Tensors for law tests: every rank, layout and kind of value that a codec may meet."""

import torch
from hypothesis import strategies as st

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "permuted", "channels_last", "strided", "expanded", "offset")
SCALES = (1.0, 2.0**-140, 2.0**6, 2.0**-8, 2.0**14, 2.0**-20, 2.0**120)
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def bits(x: torch.Tensor) -> torch.Tensor:
    """x's bit patterns, so that NaN and -0.0 compare as what they are."""
    return x.contiguous().view(INTEGERS[x.dtype]) if x.dtype in INTEGERS else x.contiguous()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bits; strides may differ."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def plain_nan(x: torch.Tensor) -> torch.Tensor:
    """x with one NaN for all, as PyTorch's CPU conversions rewrite a NaN's sign and payload in bf16 and fp16."""
    return torch.where(x.isnan(), torch.nan, x) if x.dtype in INTEGERS else x


def positive_zeros(x: torch.Tensor) -> torch.Tensor:
    """x, in which every zero is made +0: a ReLU's output on CUDA of torch 2.11, from one of the CPU."""
    return x.masked_fill_(x == 0, 0.0)


def sixteen_bit_values(dtype: torch.dtype, lower: tuple[int, ...] = (0,)) -> torch.Tensor:
    """Every pattern of 16 bits, for fp32 as the upper half before each of the lower ones."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    if dtype != torch.float32:
        return x.to(torch.int16).view(dtype)
    return torch.cat([x << 16 | low for low in lower]).view(dtype)


def special_values(dtype: torch.dtype) -> torch.Tensor:
    """Zeros of both signs, infinities, NaN, subnormals, the ends of the normal range, both signs."""
    info = torch.finfo(dtype)
    tiny = info.smallest_normal
    values = [0.0, torch.inf, torch.nan, tiny, tiny / 2, tiny * info.eps, info.max, 448.0, 464.0, 2.0**-6, 1.0]
    half = torch.tensor(values, dtype=torch.float64).to(dtype)
    return torch.cat((half, -half))


def float_values(n: int, dtype: torch.dtype, seed: int, zeros: float, patterns: bool) -> torch.Tensor:
    """n values: normal ones of a scale that the seed picks (or any bit pattern at all), a share of zeros, and for every
    other seed some special values among them."""
    g = torch.Generator().manual_seed(seed)
    width = torch.finfo(dtype).bits
    if patterns:
        integers = torch.randint(-(2 ** (width - 1)), 2 ** (width - 1), (n,), generator=g, dtype=torch.int64)
        x = integers.to(INTEGERS[dtype]).view(dtype)
    else:
        x = (torch.randn(n, generator=g, dtype=torch.float64) * SCALES[seed // 2 % len(SCALES)]).to(dtype)
    x = x.masked_fill(torch.rand(n, generator=g) < zeros, 0.0)
    if seed % 2:
        return x
    planted = special_values(dtype)
    chosen = planted[torch.randint(len(planted), (n,), generator=g)]
    return torch.where(torch.rand(n, generator=g) < 0.1, chosen, x)


def values_of(n: int, dtype: torch.dtype, seed: int, zeros: float, patterns: bool) -> torch.Tensor:
    """As :func:`float_values`, and for torch.bool and uint8 (window positions below 16) likewise."""
    if dtype in FLOATS:
        return float_values(n, dtype, seed, zeros, patterns)
    g = torch.Generator().manual_seed(seed)
    return torch.randint(2 if dtype == torch.bool else 16, (n,), generator=g).to(dtype)


def laid_out(values: torch.Tensor, shape: tuple[int, ...], layout: str) -> torch.Tensor:
    """The values (as many as the shape has elements) in one of LAYOUTS, or contiguous where it does not apply."""
    x = values.reshape(shape)
    if layout == "permuted":
        backwards = tuple(reversed(range(x.dim())))
        return x.permute(backwards).contiguous().permute(backwards)
    if layout == "channels_last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "strided" and x.dim():
        return torch.stack((x, x), -1)[..., 0]
    if layout == "expanded" and x.dim():
        return x[:1].expand(shape) if shape[0] else x
    if layout == "offset":
        return torch.cat((values[:0].new_zeros(3), values))[3:].view(shape)
    return x.clone()


SHAPES = st.one_of(
    st.lists(st.integers(2, 7), min_size=2, max_size=4).map(tuple),
    st.lists(st.integers(0, 3), min_size=0, max_size=5).map(tuple),
    st.sampled_from([(1024,), (1025,), (257,), (2, 3, 17, 23), (3, 1030), (129, 3), (1, 40, 1, 33)]),
    st.integers(0, 2600).map(lambda n: (n,)),
)


@st.composite
def tensors(draw: st.DrawFn, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of ``dtype`` (any float dtype by default) of any rank, layout and values."""
    dtype = dtype or draw(st.sampled_from(FLOATS))
    shape = draw(SHAPES)
    n = int(torch.tensor(shape).prod()) if shape else 1
    zeros = draw(st.sampled_from([0.0, 0.5, 0.95, 1.0]))
    values = values_of(n, dtype, draw(st.integers(0, 2**20)), zeros, draw(st.booleans()))
    return laid_out(values, shape, draw(st.sampled_from(LAYOUTS)))
