"""Sparse cases of many lengths, and their copies on the device."""

import torch

from tests.support.sparse_cases import SparseCase, sparse_case
from tests.support.tensors import float_values

LENGTHS = (1, 31, 256, 1000, 1023, 1025, 3 * 1024, 1_000_000, 1_000_003)


def on_device(payload: tuple) -> tuple:
    return tuple(p.cuda() if isinstance(p, torch.Tensor) else p for p in payload)


def device_case(case: SparseCase) -> SparseCase:
    return SparseCase(case.x.cuda(), case.grad.cuda(), case.fmt, case.scaling)


def make_case(n: int, dtype: torch.dtype, fmt: str, scaling: str, zeros: float = 0.5) -> SparseCase:
    return sparse_case(float_values(n, dtype, 2, zeros, False), float_values(n, dtype, 4, 0.1, False), fmt, scaling)
