"""Inputs of the sparse kernels' tests, and payloads in slots and packed, as a codec makes them."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from hypothesis import strategies as st

from gistkit.kernels import ops
from tests.support.tensors import FLOATS, float_values, plain_nan, same_bits

EMPTY = torch.empty((0,), dtype=torch.uint8)
EDGES = (0, 1, 255, 256, 257, 1023, 1024, 1025, 2047, 2049, 3000)
UNSCALED = (("raw", "none"), ("fp16", "none"), ("fp10", "none"), ("fp8", "none"))
SCALED = tuple((fmt, scaling) for fmt in ("fp16", "fp10", "fp8") for scaling in ("tensor", "block"))


@dataclass(frozen=True)
class SparseCase:
    """Values to encode, how, and a gradient for the ReLU whose output they might be."""

    x: torch.Tensor
    grad: torch.Tensor
    fmt: str
    scaling: str

    def relu(self) -> SparseCase:
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


def packed_values(kernels: ModuleType, case: SparseCase, scratch, counts, stride: int):
    """(values, exponents) as a codec packs a scratch: scaled formats narrow raw values once they are close together."""
    values = kernels.compact(scratch, counts, stride, int(counts.sum()))
    if case.scaling != "none":
        return getattr(ops, f"{case.fmt}_encode")(values, case.scaling)
    return (ops.fp10_pack(values) if case.fmt == "fp10" else values), EMPTY


def zvc_payloads(kernels: ModuleType, case: SparseCase) -> list[tuple]:
    """Payloads (words, counts, values, exponents, fmt, scaling, packed): packed, and in slots where that exists."""
    words, counts, scratch = kernels.zvc_encode(case.x, case.fmt if case.scaling == "none" else "raw")
    values, exponents = packed_values(kernels, case, scratch, counts, 1024)
    payloads = [(words, counts, values, exponents, case.fmt, case.scaling, True)]
    if case.scaling == "none":
        payloads.append((words, counts, scratch, EMPTY, case.fmt, "none", False))
    return payloads


def csr_payloads(kernels: ModuleType, case: SparseCase) -> list[tuple]:
    """Payloads (counts, columns, values, exponents, fmt, scaling, packed), likewise."""
    counts, columns, scratch = kernels.csr_encode(case.x, case.fmt if case.scaling == "none" else "raw")
    values, exponents = packed_values(kernels, case, scratch, counts, 256)
    close = kernels.compact(columns, counts, 256, int(counts.sum()))
    payloads = [(counts, close, values, exponents, case.fmt, case.scaling, True)]
    if case.scaling == "none":
        payloads.append((counts, columns, scratch, EMPTY, case.fmt, "none", False))
    return payloads


def decoded(kernels: ModuleType, case: SparseCase, payload: tuple, codec: str) -> torch.Tensor:
    *arrays, fmt, scaling, packed = payload
    return getattr(kernels, f"{codec}_decode")(*arrays, case.x.numel(), case.x.dtype, fmt, scaling, packed)


def relu_gradient(kernels: ModuleType, case: SparseCase, payload: tuple, codec: str) -> torch.Tensor:
    """By the operator that makes one; the one that overwrites the gradient must come to the same bits."""
    gradient, overwritten = getattr(kernels, f"{codec}_relu_backward")(case.grad, *payload), case.grad.clone()
    getattr(kernels, f"{codec}_relu_backward_")(overwritten, *payload)
    assert same_bits(gradient, overwritten)
    return gradient


PAYLOADS = {"zvc": zvc_payloads, "csr": csr_payloads}
