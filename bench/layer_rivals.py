"""Plain PyTorch, cuSPARSE and torch.compile for the same purpose: rows of the same table, also where they win."""

from __future__ import annotations

from functools import partial

import torch

from bench.layer_operators import POOLS, Pool
from gistkit.benchmark.cases import Case, Setting, Workload, activation, normal
from gistkit.kernels import relu_keeps_negative_zero

COLUMNS = 1024


def rival_cases() -> list[Case]:
    """Rival rows: each stands beside the case of ours that it competes with (its name says which)."""
    cases = [
        Case("torch.relu", "forward", "rival", _relu),
        Case("torch threshold_backward", "backward", "rival", _threshold_backward),
        Case("torch.compile relu + bool mask", "forward", "rival", _compiled_relu, cuda_only=True),
        Case("torch.compile bool mask", "backward", "rival", _compiled_mask, cuda_only=True),
    ]
    for name, narrow, relative in (("float8_e4m3fn", torch.float8_e4m3fn, 2**-4), ("float16", torch.float16, 2**-11)):
        for direction, make in (("encode", _cast), ("decode", _cast_back)):
            loss = {"lossless": False, "relative_error": relative}
            cases.append(Case(f"torch .to({name})", direction, "rival", partial(make, narrow), **loss))
    # Gist section V-A stores a ReLU output by cuSPARSE's dense-to-CSR conversion. It keeps all but the sign of a -0.0.
    for direction, make in (("encode", _to_csr), ("decode", _from_csr)):
        rest = {"densities": (0.5, 0.1), "by_density": True, "lossless": False, "relative_error": 0.0}
        cases.append(Case("torch to_sparse_csr (int64)", direction, "rival", make, **rest))
    for pool in POOLS:
        cases.append(Case(f"torch {pool.name}, int64 indices", "forward", "rival", partial(_pool_forward, pool)))
        cases.append(Case(f"torch {pool.name}, int64 indices", "backward", "rival", partial(_pool_backward, pool)))
    return cases


def _relu(s: Setting) -> Workload:
    x = normal(s)

    def expected() -> torch.Tensor:
        y = torch.relu(x.cpu())
        return y if relu_keeps_negative_zero(x) else y.masked_fill_(y == 0, 0.0)

    return Workload(lambda: torch.relu(x), expected, 2 * x.nbytes, tuple(x.shape), 1.0)


def _threshold_backward(s: Setting) -> Workload:
    y, grad = activation(s), normal(s.other())
    backward = torch.ops.aten.threshold_backward
    expected = partial(lambda: backward(grad.cpu(), y.cpu(), 0))
    return Workload(lambda: backward(grad, y, 0), expected, 3 * grad.nbytes, tuple(grad.shape), 1.0)


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
    return Workload(run, expected, 2 * x.nbytes + s.numel, tuple(x.shape), s.numel / x.nbytes)


def _compiled_mask(s: Setting) -> Workload:
    grad, mask, compiled = normal(s), activation(s.other()) > 0, torch.compile(_where_mask)
    expected = partial(_where_mask, grad, mask)
    return Workload(
        lambda: compiled(grad, mask), expected, 2 * grad.nbytes + s.numel, tuple(grad.shape), s.numel / grad.nbytes
    )


def _finite(s: Setting) -> torch.Tensor:
    """Values whose conversion no release of torch disagrees on: overflow and NaN bits are not compared here."""
    return normal(s).nan_to_num(0.0, 1.0, -1.0).clamp(-400, 400)


def _cast(narrow: torch.dtype, s: Setting) -> Workload:
    x = _finite(s)
    narrow_bytes = s.numel * narrow.itemsize
    moved_bytes, ratio = x.nbytes + narrow_bytes, narrow_bytes / x.nbytes
    return Workload(lambda: x.to(narrow), lambda: x.cpu().to(narrow), moved_bytes, tuple(x.shape), ratio)


def _cast_back(narrow: torch.dtype, s: Setting) -> Workload:
    codes = _finite(s).to(narrow)
    moved_bytes, ratio = codes.nbytes + s.nbytes, codes.nbytes / (s.numel * s.dtype.itemsize)
    return Workload(lambda: codes.to(s.dtype), lambda: codes.cpu().to(s.dtype), moved_bytes, tuple(codes.shape), ratio)


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
    nbytes = _csr_bytes(x.to_sparse_csr())
    return Workload(run, lambda: x + 0.0, x.nbytes + nbytes, tuple(x.shape), nbytes / x.nbytes)


def _from_csr(s: Setting) -> Workload:
    x = _matrix(s)
    csr = x.to_sparse_csr()
    nbytes = _csr_bytes(csr)
    return Workload(lambda: csr.to_dense(), lambda: x + 0.0, x.nbytes + nbytes, tuple(x.shape), nbytes / x.nbytes)


def _pool_forward(pool: Pool, s: Setting) -> Workload:
    x = pool.image(s, finite=True)
    forward = torch.ops.aten.max_pool2d_with_indices
    y, indices = forward(x, *pool.window)
    return Workload(
        lambda: forward(x, *pool.window),
        lambda: forward(x.cpu(), *pool.window),
        x.nbytes + y.nbytes + indices.nbytes,
        tuple(x.shape),
        _kept(x, indices),
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
        _kept(x, indices),
    )


def _kept(x: torch.Tensor, indices: torch.Tensor) -> float:
    """PyTorch's max-pool keeps its indices, and its input for the sizes alone."""
    return (x.nbytes + indices.nbytes) / x.nbytes
