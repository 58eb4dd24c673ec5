"""The short way of a batch norm, by PyTorch's own node or by gistkit's, and of its part in rebuilds.

A rebuild needs a copy of weight and bias, which may change before backward. A copy for each batch norm is a launch for
each; so the first of a forward copies them for all that come, and each takes its part if nobody has written to its
parameters since, on the same stream.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

from gistkit.graph.calls import BatchNorm
from gistkit.nn import norm
from gistkit.nn.keep import Alias, Kept
from gistkit.runtime import native
from gistkit.runtime.fast import Kind, ParameterKind
from gistkit.runtime.program import Step
from gistkit.runtime.rebuild import BatchNormTerm
from gistkit.runtime.region import Held, Region
from gistkit.runtime.stats import payload_bytes


class FastBatchNorm:
    """A training batch norm whose dense input stays; ``rebuild``: the arithmetic that gives its output back, or None
    where nothing is rebuilt from it."""

    def __init__(self, region: Region, step: Step, b: BatchNorm, rebuild: norm.Rebuild | None) -> None:
        self._x, self._parameter = Kind(b.x), ParameterKind(b.weight)  # type: ignore[arg-type]
        self._index, self._storage, self._rebuild = step.index, step.input.storage, rebuild  # type: ignore[union-attr]
        self._cudnn = torch._C._get_cudnn_enabled()
        self._nbytes = b.x.untyped_storage().nbytes()
        self._held = Held(None, self._nbytes, self._storage, step.input.reason)  # type: ignore[union-attr]
        self._own = tuple((i, op, payload_bytes(own)) for i, op, own in region.own if i == step.index)
        self.parameters: tuple | None = None
        if rebuild in norm.KERNEL_CANDIDATES:
            self.parameters = weakref.ref(b.weight), weakref.ref(b.bias)  # type: ignore[arg-type]

    @staticmethod
    def takes(region: Region, step: Step, b: BatchNorm) -> bool:
        """Whether this batch norm, which PyTorch's node has carried out, can be told again by kind."""
        weight, bias, storage = b.weight, b.bias, b.x.untyped_storage()
        affine = type(weight) is Parameter and ParameterKind(weight).fits(bias)
        held = step.input is not None and step.input.storage >= 0 and storage._cdata in region.held
        return affine and held and type(b.x) is torch.Tensor

    def __call__(self, region: Region, b: BatchNorm, *_: Any) -> torch.Tensor | None:
        x = b.x
        if not self._x.fits(x) or not self._parameter.fits(b.weight, b.bias):
            return None
        storage = x.untyped_storage()
        if not b.training or storage.nbytes() != self._nbytes:
            return None
        if region.table.find(x) is not None or torch._C._get_cudnn_enabled() is not self._cudnn:
            return None
        y, stats = native.batch_norm(b)
        hold = Alias(x)
        region.aliased(x, self._storage, hold)
        region.held.setdefault(storage._cdata, self._held)
        region.own.extend(self._own)
        if self._rebuild is not None:
            self._remember(region, b, hold, stats, y)
        return y

    def _remember(self, region: Region, b: BatchNorm, hold: Kept, stats: tuple, y: torch.Tensor) -> None:
        """The batch norm's part in rebuilds."""
        affine = None if self.parameters is None else self._affine(region, b)
        apply, _ = norm.bound(self._rebuild, b.x, stats[0], stats[1], b.weight, b.bias, affine)  # type: ignore[arg-type]
        region.norms[self._index] = BatchNormTerm(hold, apply)
        region.origins.made("bn", self._index, y)

    def _affine(self, region: Region, b: BatchNorm) -> torch.Tensor | None:
        """This batch norm's part of the forward's copies of weights and biases; None where it is not what is there."""
        if region.affines is None:
            region.affines = _copies(region.fast)
        found = region.affines.get(self._index)
        if found is None:
            return None
        weight, bias, versions, copy, stream = found
        same = weight is b.weight and bias is b.bias and (weight._version, bias._version) == versions
        return copy if same and _stream(weight) == stream else None


class FastCodedBatchNorm(FastBatchNorm):
    """A training batch norm that gistkit's node carries out, its input kept as the plan has it; ``y``: its result."""

    def __init__(self, region: Region, step: Step, b: BatchNorm, rebuild: norm.Rebuild | None, y: torch.Tensor) -> None:
        super().__init__(region, step, b, rebuild)
        self._running = type(b.running_mean), type(b.running_var)
        self._keeps = step.input
        self._statistics = (step.index, step.op, payload_bytes(y.grad_fn.kept[norm.STATISTICS]))  # type: ignore[union-attr]

    @staticmethod
    def takes(region: Region, step: Step, b: BatchNorm, y: torch.Tensor) -> bool:  # type: ignore[override]
        """Whether this batch norm, which gistkit's node has carried out, can be told again by kind."""
        affine = type(b.weight) is Parameter and ParameterKind(b.weight).fits(b.bias)
        known = type(b.x) is torch.Tensor and step.input is not None
        return affine and known and type(getattr(y.grad_fn, "kept", None)) is tuple

    def __call__(self, region: Region, b: BatchNorm, *_: Any) -> torch.Tensor | None:
        if not self._x.fits(b.x) or not self._parameter.fits(b.weight, b.bias) or not b.training:
            return None
        if (type(b.running_mean), type(b.running_var)) != self._running:
            return None
        if torch._C._get_cudnn_enabled() is not self._cudnn:
            return None
        running = (b.running_mean, b.running_var, b.momentum, b.eps)
        y = norm.trained(b.x, b.weight, b.bias, running, partial(region.keep, decision=self._keeps), None)
        hold, mean, invstd = y.grad_fn.kept[:3]  # type: ignore[union-attr]
        region.own.append(self._statistics)
        if self._rebuild is not None:
            region.own.extend(self._own)
            self._remember(region, b, hold, (mean, invstd), y)
        return y


def _stream(t: torch.Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(t.get_device()) if t.is_cuda else 0


def _copies(calls: list) -> dict[int, tuple]:
    """By call: weight, bias, their versions, a copy of both as one, the stream that it was made on."""
    wanted: dict[tuple, list[tuple]] = {}
    for index, entry in enumerate(calls):
        call: Any = None if entry is None else entry[2]
        if isinstance(call, FastBatchNorm) and call.parameters is not None:
            weight, bias = call.parameters[0](), call.parameters[1]()
            if weight is not None and bias is not None and weight.dtype is bias.dtype:
                wanted.setdefault((weight.dtype, weight.device), []).append((index, weight, bias))
    found = {}
    with torch.no_grad():
        for group in wanted.values():
            vectors = [v for _, weight, bias in group for v in (weight, bias)]
            parts = norm.as_fp32(torch.cat(vectors)).split([2 * weight.numel() for _, weight, _ in group])
            stream = _stream(vectors[0])
            for (index, weight, bias), part in zip(group, parts, strict=True):
                found[index] = weight, bias, (weight._version, bias._version), part, stream
    return found


__all__ = ["FastBatchNorm", "FastCodedBatchNorm"]
