"""Plain PyTorch, cuSPARSE and torch.compile for the same purpose: rows of the same table, also where they win."""

from __future__ import annotations

from functools import partial

import torch

from gistkit.benchmark.cases import Case, Setting, Workload, activation, normal
from gistkit.benchmark.operators import POOLS, Pool
from gistkit.kernels.reference.mask import relu as rectified
from gistkit.kernels.signed_zero import relu_keeps_negative_zero

COLUMNS = 1024


def rival_cases() -> list[Case]:
    """Rival rows: each stands beside the case of ours that it competes with (its name says which)."""
    cases = [
        Case("torch.relu", "forward", "rival", _relu),
        Case("torch threshold_backward", "backward", "rival", _threshold_backward),
        Case("torch.compile relu + bool mask", "forward", "rival", _compiled_relu, cuda_only=True),
        Case("torch.compile bool mask", "backward", "rival", _compiled_mask, cuda_only=True),
        Case("torch .to(float8_e4m3fn)", "encode", "rival", partial(_cast, torch.float8_e4m3fn)),
        Case("torch .to(float8_e4m3fn)", "decode", "rival", partial(_cast_back, torch.float8_e4m3fn)),
        Case("torch .to(float16)", "encode", "rival", partial(_cast, torch.float16)),
        Case("torch .to(float16)", "decode", "rival", partial(_cast_back, torch.float16)),
        # Gist section V-A stores a ReLU output by cuSPARSE's dense-to-CSR conversion.
        Case("torch to_sparse_csr (int64)", "encode", "rival", _to_csr, densities=(0.5, 0.1)),
        Case("torch to_sparse_csr (int64)", "decode", "rival", _from_csr, densities=(0.5, 0.1)),
    ]
    for pool in POOLS:
        cases.append(Case(f"torch {pool.name}, int64 indices", "forward", "rival", partial(_pool_forward, pool)))
        cases.append(Case(f"torch {pool.name}, int64 indices", "backward", "rival", partial(_pool_backward, pool)))
    return cases


def _relu(s: Setting) -> Workload:
    x = normal(s)

    def expected() -> torch.Tensor:
        return rectified(x.cpu(), positive_zero=not relu_keeps_negative_zero(x))

    return Workload(lambda: torch.relu(x), expected, 2 * x.nbytes, tuple(x.shape))


def _threshold_backward(s: Setting) -> Workload:
    y, grad = activation(s), normal(s.other())
    backward = torch.ops.aten.threshold_backward
    expected = partial(lambda: backward(grad.cpu(), y.cpu(), 0))
    return Workload(lambda: backward(grad, y, 0), expected, 3 * grad.nbytes, tuple(grad.shape))


def _relu_and_mask(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.relu(x), x > 0


def _where_mask(grad: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, grad, 0)


def _compiled_relu(s: Setting) -> Workload:
    x, compiled = normal(s), torch.compile(_relu_and_mask)

    def checked() -> tuple[torch.Tensor, torch.Tensor]:
        y, mask = compiled(x)
        # torch.compile's ReLU keeps -0.0 also where PyTorch's own gives +0: that bit is left out.
        return y.masked_fill(y == 0, 0.0), mask

    def expected() -> tuple[torch.Tensor, torch.Tensor]:
        y, mask = _relu_and_mask(x)
        return y.masked_fill(y == 0, 0.0), mask

    run = checked if s.sample else lambda: compiled(x)
    return Workload(run, expected, 2 * x.nbytes + s.numel, tuple(x.shape))


def _compiled_mask(s: Setting) -> Workload:
    grad, mask, compiled = normal(s), activation(s.other()) > 0, torch.compile(_where_mask)
    expected = partial(_where_mask, grad, mask)
    return Workload(lambda: compiled(grad, mask), expected, 2 * grad.nbytes + s.numel, tuple(grad.shape))


def _finite(s: Setting) -> torch.Tensor:
    """Values whose conversion no release of torch disagrees on: overflow and NaN bits are not compared here."""
    return normal(s).nan_to_num(0.0, 1.0, -1.0).clamp(-400, 400)


def _cast(narrow: torch.dtype, s: Setting) -> Workload:
    x = _finite(s)
    moved_bytes = x.nbytes + s.numel * narrow.itemsize
    return Workload(lambda: x.to(narrow), lambda: x.cpu().to(narrow), moved_bytes, tuple(x.shape))


def _cast_back(narrow: torch.dtype, s: Setting) -> Workload:
    codes = _finite(s).to(narrow)
    moved_bytes = codes.nbytes + s.nbytes
    return Workload(lambda: codes.to(s.dtype), lambda: codes.cpu().to(s.dtype), moved_bytes, tuple(codes.shape))


def _matrix(s: Setting) -> torch.Tensor:
    """Rows of a ReLU output; subnormals are zeros, as ``to_dense`` adds by atomics, and CUDA's of fp32 flush them."""
    x = activation(s).nan_to_num(1.0, 2.0)
    x = x.masked_fill_(x < torch.finfo(s.dtype).smallest_normal, 0.0)
    return x[: x.numel() // COLUMNS * COLUMNS].view(-1, COLUMNS)


def _csr_bytes(csr: torch.Tensor) -> int:
    return csr.crow_indices().nbytes + csr.col_indices().nbytes + csr.values().nbytes


def _to_csr(s: Setting) -> Workload:
    x = _matrix(s)
    run = (lambda: x.to_sparse_csr().to_dense()) if s.sample else (lambda: x.to_sparse_csr())
    return Workload(run, lambda: x + 0.0, x.nbytes + _csr_bytes(x.to_sparse_csr()), tuple(x.shape))


def _from_csr(s: Setting) -> Workload:
    x = _matrix(s)
    csr = x.to_sparse_csr()
    return Workload(lambda: csr.to_dense(), lambda: x + 0.0, x.nbytes + _csr_bytes(csr), tuple(x.shape))


def _pool_forward(pool: Pool, s: Setting) -> Workload:
    x = pool.image(s, finite=True)
    forward = torch.ops.aten.max_pool2d_with_indices
    moved_bytes = x.nbytes + sum(t.nbytes for t in forward(x, *pool.window))
    return Workload(
        lambda: forward(x, *pool.window), lambda: forward(x.cpu(), *pool.window), moved_bytes, tuple(x.shape)
    )


def _pool_backward(pool: Pool, s: Setting) -> Workload:
    x = pool.image(s, finite=True)
    y, indices = torch.ops.aten.max_pool2d_with_indices(x, *pool.window)
    # Ones: every sum of gradients is exact, so the order of summation, which PyTorch leaves open, cannot show.
    grad_y = torch.ones_like(y)
    backward = torch.ops.aten.max_pool2d_with_indices_backward
    rest = (*pool.window, False)
    return Workload(
        lambda: backward(grad_y, x, *rest, indices),
        lambda: backward(grad_y.cpu(), x.cpu(), *rest, indices.cpu()),
        grad_y.nbytes + indices.nbytes + x.nbytes,
        tuple(x.shape),
    )
