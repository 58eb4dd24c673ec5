"""Cases of the fused operators: ReLU with its mask, masked gradients, max-pool with 4-bit maps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from gistkit.benchmark.cases import Case, Setting, Workload, activation, normal
from gistkit.formats import argmax_bytes, mask1_bytes
from gistkit.kernels import ops


def operator_cases() -> list[Case]:
    """One case an operator and geometry; the pools in both layouts."""
    cases = [
        Case("relu_mask1", "forward", "operator", _relu_mask1),
        Case("mask1_backward", "backward", "operator", _mask1_backward),
        Case("dropout_backward", "backward", "operator", _dropout_backward),
    ]
    for pool in POOLS:
        cases.append(Case(pool.name, "forward", "operator", partial(_pool_forward, pool)))
        cases.append(Case(pool.name, "backward", "operator", partial(_pool_backward, pool)))
        cases.append(Case(f"relu_{pool.name}", "forward", "operator", partial(_pool_forward, pool, fused=True)))
        cases.append(Case(f"relu_{pool.name}", "backward", "operator", partial(_pool_backward, pool, fused=True)))
    return cases


def _relu_mask1(s: Setting) -> Workload:
    x = normal(s)
    mask_bytes = mask1_bytes(s.numel)
    expected = partial(lambda: (torch.relu(x), ops.mask1_encode(x.cpu())))
    moved_bytes, ratio = 2 * x.nbytes + mask_bytes, mask_bytes / x.nbytes
    return Workload(lambda: ops.relu_mask1(x), expected, moved_bytes, tuple(x.shape), ratio)


def _mask1_backward(s: Setting) -> Workload:
    y, grad = activation(s), normal(s.other())
    mask = ops.mask1_encode(y)
    return Workload(
        lambda: ops.mask1_backward(grad, mask),
        lambda: torch.ops.aten.threshold_backward(grad, y, 0),
        2 * grad.nbytes + mask.nbytes,
        tuple(grad.shape),
        mask.nbytes / grad.nbytes,
    )


def _dropout_backward(s: Setting) -> Workload:
    grad, keep = normal(s), normal(s.other(torch.float32)) > 0
    mask = ops.bits_encode(keep)
    return Workload(
        lambda: ops.dropout_backward(grad, mask, 2.0),
        lambda: torch.ops.aten.native_dropout_backward(grad, keep, 2.0),
        2 * grad.nbytes + mask.nbytes,
        tuple(grad.shape),
        mask.nbytes / grad.nbytes,
    )


@dataclass(frozen=True)
class Pool:
    """A square max-pool over [N, 64, 112, 112] (samples: [2, 8, 19, 21]) in one of the two layouts."""

    name: str
    kernel: int
    stride: int
    padding: int
    channels_last: bool

    @property
    def window(self) -> tuple[list[int], list[int], list[int]]:
        """kernel, stride, padding as the operators take them."""
        return [self.kernel] * 2, [self.stride] * 2, [self.padding] * 2

    def image(self, s: Setting, *, finite: bool = False) -> torch.Tensor:
        """The input; gradients are drawn finite, since sums of infinities differ in the sign bit of their NaN."""
        c, h, w = (8, 19, 21) if s.sample else (64, 112, 112)
        n = 2 if s.sample else max(1, s.numel // (c * h * w))
        flat_s = Setting(s.device, s.dtype, n * c * h * w * s.dtype.itemsize, s.density, s.seed, s.sample)
        x = normal(flat_s)
        x = x.nan_to_num(0.0, 1.0, -1.0) if finite else x
        if self.channels_last:
            return x.view(n, h, w, c).permute(0, 3, 1, 2)
        return x.view(n, c, h, w)


POOLS = [
    Pool(f"maxpool{k}x{k}s{stride}{'_nhwc' if last else ''}", k, stride, pad, last)
    for k, stride, pad in ((3, 2, 1), (2, 2, 0))
    for last in (False, True)
]


def _pool_forward(pool: Pool, s: Setting, fused: bool = False) -> Workload:
    x = pool.image(s)
    out = ops.maxpool_forward(x, *pool.window, False, fused, fused, 4)

    def expected():
        y = torch.nn.functional.max_pool2d(torch.relu(x) if fused else x, *pool.window)
        return y, ops.maxpool_forward(x.cpu(), *pool.window, False, fused, fused, 4)[1]

    map_bytes = argmax_bytes(out[0].numel(), 4)
    run = partial(ops.maxpool_forward, x, *pool.window, False, fused, fused, 4)
    return Workload(run, expected, x.nbytes + out[0].nbytes + map_bytes, tuple(x.shape), map_bytes / x.nbytes)


def _pool_backward(pool: Pool, s: Setting, fused: bool = False) -> Workload:
    x = pool.image(s, finite=True)
    y, codes = ops.maxpool_forward(x, *pool.window, False, fused, fused, 4)
    grad_y = torch.randn(y.shape, generator=torch.Generator().manual_seed(s.seed)) if s.sample else torch.randn_like(y)
    grad_y = grad_y.to(y).to(memory_format=torch.channels_last if pool.channels_last else torch.contiguous_format)
    rest = (codes, *x.shape[2:], *pool.window, pool.channels_last, fused, 4)

    def expected():
        # The contract: gradients added in row-major order of the outputs, on CUDA in fp32 and rounded once.
        wide = grad_y.cpu() if s.device == "cpu" else grad_y.cpu().float()
        return ops.maxpool_backward(wide, codes.cpu(), *rest[1:]).to(s.dtype)

    moved_bytes = grad_y.nbytes + codes.nbytes + x.nbytes
    run = partial(ops.maxpool_backward, grad_y, *rest)
    return Workload(run, expected, moved_bytes, tuple(x.shape), codes.nbytes / x.nbytes)
