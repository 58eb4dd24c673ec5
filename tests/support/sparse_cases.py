"""Inputs of the sparse kernels' tests, and payloads in slots and packed, as a codec makes them."""

from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from hypothesis import strategies as st

from gistkit.kernels import STRIDES, ops
from tests.support.tensors import FLOATS, float_values, plain_nan, same_bits

EMPTY = torch.empty((0,), dtype=torch.uint8)
EDGES = (0, 1, 255, 256, 257, 1023, 1024, 1025, 2047, 2049, 3000)
UNSCALED = (("raw", "none"), ("fp16", "none"), ("fp10", "none"), ("fp8", "none"))
SCALED = tuple((fmt, "block") for fmt in ("fp16", "fp10", "fp8"))


@dataclass(frozen=True)
class SparseCase:
    """Values to encode, how, and a gradient for the ReLU whose output they might be."""

    x: torch.Tensor
    grad: torch.Tensor
    fmt: str
    scaling: str

    def relu(self) -> "SparseCase":
        """The same with a ReLU's output for x: no negative values, but -0.0 and NaN of both signs."""
        x = torch.where(self.x < 0, -self.x, self.x)
        return SparseCase(x, self.grad, self.fmt, self.scaling)


def sparse_case(x: torch.Tensor, grad: torch.Tensor, fmt: str, scaling: str) -> SparseCase:
    """Narrow formats get one NaN for all: PyTorch's CPU conversions rewrite others, vectors otherwise than tails."""
    return SparseCase(x if fmt == "raw" else plain_nan(x), grad, fmt, scaling)


@st.composite
def sparse_cases(draw: st.DrawFn, longest: int = 3000, formats=UNSCALED + SCALED) -> SparseCase:
    n = draw(st.one_of(st.sampled_from([e for e in EDGES if e <= longest]), st.integers(0, longest)))
    dtype = draw(st.sampled_from(FLOATS))
    zeros = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]))
    seed = draw(st.integers(0, 2**20))
    x = float_values(n, dtype, seed, zeros, draw(st.booleans()))
    grad = float_values(n, dtype, seed + 1, 0.1, False)
    fmt, scaling = draw(st.sampled_from(formats))
    return sparse_case(x, grad, fmt, scaling)


def payloads(kernels: ModuleType, case: SparseCase, codec: str) -> list[tuple]:
    """Payloads (index, counts, values, exponents, fmt, scaling, packed) as a codec makes them: packed, scaled formats
    narrowed once values are close together, and in slots where that exists."""
    encode, stride = getattr(kernels, f"{codec}_encode"), STRIDES[codec]
    index, counts, scratch = encode(case.x, case.fmt if case.scaling == "none" else "raw")
    total, exponents = int(counts.sum()), EMPTY.to(scratch.device)
    values = kernels.compact(scratch, counts, stride, total)
    if case.scaling != "none":
        values, exponents = ops.narrow_encode(values, case.fmt, case.scaling)
    elif case.fmt == "fp10":
        values = ops.fp10_pack(values)
    close = kernels.compact(index, counts, stride, total) if codec == "csr" else index
    made = [(close, counts, values, exponents, case.fmt, case.scaling, True)]
    if case.scaling == "none":
        made.append((index, counts, scratch, exponents, case.fmt, "none", False))
    return made


def decoded(kernels: ModuleType, case: SparseCase, payload: tuple, codec: str) -> torch.Tensor:
    """The whole of x from a payload and its form."""
    whole = (case.x.numel(), case.x.dtype)
    return getattr(kernels, f"{codec}_decode")(*payload[:4], *whole, *payload[4:])


def relu_gradient(kernels: ModuleType, case: SparseCase, payload: tuple, codec: str) -> torch.Tensor:
    """Into a new tensor; overwriting the gradient must come to the same bits."""
    gradient, overwritten = torch.empty_like(case.grad), case.grad.clone()
    for grad, out in ((case.grad, gradient), (overwritten, overwritten)):
        getattr(kernels, f"{codec}_relu_backward")(grad, *payload[:4], out, *payload[4:])
    assert same_bits(gradient, overwritten)
    return gradient


PAYLOADS = {codec: partial(payloads, codec=codec) for codec in STRIDES}
