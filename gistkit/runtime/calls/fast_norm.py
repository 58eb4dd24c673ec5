"""The short way of a batch norm, by PyTorch's own node or by gistkit's, and of its part in rebuilds.

A rebuild needs a copy of weight and bias, which may change before backward. A copy for each batch norm is a launch for
each; so the first of a forward copies them for all that come, and each takes its part if nobody has written to its
parameters since, on the same stream. Not under a budget, which counts on each copy's going by itself.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn import Parameter

from gistkit.capture import BatchNorm
from gistkit.nn import norm
from gistkit.nn.factors import Factors, as_fp32
from gistkit.nn.keep import Alias, Kept
from gistkit.runtime.calls import native
from gistkit.runtime.calls.fast import Kind, ParameterKind, geometry
from gistkit.runtime.calls.narrow_body import Narrowing
from gistkit.runtime.calls.native import Hooks
from gistkit.runtime.forward.kept_ledger import Held
from gistkit.runtime.forward.state import Region
from gistkit.runtime.program.program import Step
from gistkit.runtime.program.stats import payload_bytes
from gistkit.runtime.rebuild.rebuild import BatchNormTerm
from gistkit.runtime.stash.stash import Stash


class FastBatchNorm:
    """A training batch norm whose dense input stays; ``rebuild``: the arithmetic that gives its output y back, or None
    where nothing is rebuilt from it."""

    def __init__(self, region: Region, step: Step, b: BatchNorm, rebuild: norm.Rebuild | None, y: torch.Tensor) -> None:
        self._x, self._parameter = Kind(b.x), ParameterKind(b.weight)  # type: ignore[arg-type]
        self._decision: Any = step.input
        self._storage, self._rebuild = self._decision.storage, rebuild
        self._index, self._term, self._geometry = step.index, ("bn", step.index), geometry(y)
        self._cudnn = torch._C._get_cudnn_enabled()
        self._nbytes = b.x.untyped_storage().nbytes()
        self._held = Held(None, self._nbytes, self._storage, self._decision.reason)
        self._own = tuple((i, op, payload_bytes(own)) for i, op, own in region.own if i == step.index)
        self._is_source = self._storage in region.program.sources if region.program is not None else False
        self._form, self.parameters = "", None
        if rebuild in norm.KERNEL_CANDIDATES:
            self._form = rebuild.args[0]  # type: ignore[union-attr]
            self.parameters: Any = weakref.ref(b.weight), weakref.ref(b.bias)  # type: ignore[arg-type]

    @staticmethod
    def takes(region: Region, step: Step, b: BatchNorm) -> bool:
        """Whether this batch norm, which PyTorch's node has carried out, can be told again by kind."""
        weight, bias, storage = b.weight, b.bias, b.x.untyped_storage()
        affine = type(weight) is Parameter and ParameterKind(weight).fits(bias)
        held = step.input is not None and step.input.storage >= 0 and storage._cdata in region.held
        return affine and held and type(b.x) is torch.Tensor

    def __call__(
        self, region: Region, hooks: Hooks, x: Any, mean: Any, var: Any, weight: Any, bias: Any, training: Any,
        momentum: Any, eps: Any,
    ) -> torch.Tensor | None:  # fmt: skip
        if training is not True or not self._x.fits(x) or not self._parameter.fits(weight, bias):
            return None
        storage, cudnn = x.untyped_storage(), torch._C._get_cudnn_enabled()
        address = storage._cdata
        if storage.nbytes() != self._nbytes or cudnn is not self._cudnn or region.table.find_in(address, x) is not None:
            return None
        y, saved_mean, invstd, _ = native.trained(hooks, x, weight, bias, (mean, var, momentum, eps), cudnn)
        hold = Alias(x)
        if self._is_source:
            region.aliased(x, self._storage, hold)
        else:
            region.aliases[self._storage] = hold
        region.held.setdefault(address, self._held)
        region.own.extend(self._own)
        if self._rebuild is not None:
            self._remember(region, x, weight, bias, hold, saved_mean, invstd, y)
        return y

    def _remember(
        self, region: Region, x: torch.Tensor, weight: Any, bias: Any, hold: Kept, mean: Any, invstd: Any, y: Any
    ) -> None:
        """The batch norm's part in rebuilds."""
        # a budget counts each batch norm's own vectors, which go when its last reader has
        affine = self._affine(region, weight, bias) if self._form and not region.bound else None
        if affine is None or mean.dtype is not torch.float32:
            apply: Any = norm.bound(self._rebuild, x, mean, invstd, weight, bias, affine)[0]  # type: ignore[arg-type]
        else:
            apply = Factors(mean, invstd, affine, self._form)
        region.norms[self._index] = BatchNormTerm(hold, apply)
        region.origins.made_as(self._term, (region.table.known(y), self._geometry))

    def _affine(self, region: Region, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor | None:
        """This batch norm's part of the forward's copies of weights and biases; None where it is not what is there."""
        affines = region.affines
        if affines is None:
            affines = region.affines = _copies(region.fast)
        found = affines.get(self._index)
        if found is None:
            return None
        w, b, version, bias_version, copy, stream = found
        same = w is weight and b is bias and weight._version == version and bias._version == bias_version
        return copy if same and _stream(weight) == stream else None


class FastCodedBatchNorm(FastBatchNorm):
    """A training batch norm by PyTorch's node, its saved input replaced by what the plan has it keep."""

    def __init__(self, region: Region, step: Step, b: BatchNorm, rebuild: norm.Rebuild | None, y: torch.Tensor) -> None:
        super().__init__(region, step, b, rebuild, y)
        self._narrowing = Narrowing.of(self._decision, b.x)

    @staticmethod
    def takes(b: BatchNorm) -> bool:  # type: ignore[override]
        """Whether this batch norm, which PyTorch's node has carried out, can be told again by kind."""
        affine = type(b.weight) is Parameter and ParameterKind(b.weight).fits(b.bias)
        return affine and type(b.x) is torch.Tensor

    def __call__(
        self, region: Region, hooks: Hooks, x: Any, mean: Any, var: Any, weight: Any, bias: Any, training: Any,
        momentum: Any, eps: Any,
    ) -> torch.Tensor | None:  # fmt: skip
        if training is not True or not self._x.fits(x) or not self._parameter.fits(weight, bias):
            return None
        cudnn = torch._C._get_cudnn_enabled()
        if cudnn is not self._cudnn:
            return None
        y, saved_mean, invstd, _ = native.trained(hooks, x, weight, bias, (mean, var, momentum, eps), cudnn)
        kept = self._kept(region, x)
        native.replace_input(y, kept)
        region.own.extend(self._own)
        if self._rebuild is not None:
            self._remember(region, x, weight, bias, kept, saved_mean, invstd, y)
        return y

    def _kept(self, region: Region, x: torch.Tensor) -> Kept:
        """The hold on x as decided."""
        storage = x.untyped_storage()
        if self._narrowing is None or storage.nbytes() != self._nbytes:
            return region.keep(x, self._decision)
        if region.table.find_in(storage._cdata, x) is not None:
            return region.keep(x, self._decision)
        body, decision = self._narrowing(x), self._decision
        region.stashed(x, Stash(body, decision.storage, decision.codec, self._nbytes, decision.reason))
        return body


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
            parts = as_fp32(torch.cat(vectors)).split([2 * weight.numel() for _, weight, _ in group])
            stream = _stream(vectors[0])
            for (index, weight, bias), part in zip(group, parts, strict=True):
                found[index] = weight, bias, weight._version, bias._version, part, stream
    return found


__all__ = ["FastBatchNorm", "FastCodedBatchNorm"]
