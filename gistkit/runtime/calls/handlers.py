"""What a region does with each covered call: the plan's decision where there is one, the op of gistkit.functional with
it.

A handler takes the region, the plan's step and the bound arguments, and returns what PyTorch's own function would have
returned. It may assume that the first operand is a plain floating tensor (:func:`runs`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gistkit.capture import BatchNorm, Bound, Conv2d, Dropout, Linear, MaxPool2d, Relu
from gistkit.ir import Decision
from gistkit.kernels import is_dense
from gistkit.nn import conv, functional, norm
from gistkit.nn import relu as relu_op
from gistkit.nn.eligible import KERNEL_DTYPES, is_wrapped, transformed
from gistkit.nn.keep import Alias, Coded, Kept
from gistkit.nn.overwrite import overwrite_relu
from gistkit.nn.switched import is_switched
from gistkit.runtime.calls import native
from gistkit.runtime.calls.fast_conv import FastConv2d
from gistkit.runtime.calls.fast_norm import FastBatchNorm, FastCodedBatchNorm
from gistkit.runtime.calls.fast_relu import FastDenseRelu, FastRelu
from gistkit.runtime.forward.state import Region
from gistkit.runtime.forward.watch import Promise
from gistkit.runtime.offload.host import AwayOnHost
from gistkit.runtime.program.program import Step
from gistkit.runtime.rebuild.exactness import arithmetic, exact, known, try_drawn, ways
from gistkit.runtime.rebuild.rebuild import BatchNormTerm, ReluTerm, builder, fused, resolve
from gistkit.runtime.stash.stash import Reader, RebuiltBody, Rows, Stash, covers

_NUMBERS = frozenset((int, float, bool, tuple, str, type(None)))
Stats = tuple[torch.Tensor, torch.Tensor]
Build = Callable[[Rows], torch.Tensor]
NOT_EXACT = "it cannot be rebuilt bit for bit on this device"
MADE_OTHERWISE = "the forward made it in another way than when it was captured"


def runs(bound: Bound) -> bool:
    """True where gistkit's own op can take these operands; else PyTorch's runs, its saved tensors under the hooks."""
    if transformed():
        return False
    values: Any = bound
    for t in values:
        kind = type(t)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if t.dtype not in KERNEL_DTYPES or t.layout is not torch.strided or t.is_neg():
                return False
            # a parameter is no wrapper of a transform's, and lies where its operand does, or PyTorch's op would refuse
            if kind is torch.Tensor and (not (t.is_cuda or t.is_cpu) or t.is_nested or is_wrapped(t)):
                return False
        elif kind not in _NUMBERS and isinstance(t, torch.Tensor):
            return False
    return True


def relu(region: Region, step: Step, b: Relu) -> torch.Tensor:
    """ReLU: a mask of its own, the stash that its readers share, or nothing where a pool's map carries the mask."""
    x, decision = b.x, step.output
    if not x.requires_grad:
        return relu_op.run(x, b.inplace)
    if decision is not None and decision.codec == "drop" and step.choice.passes and is_dense(x):
        promise = Promise()
        y = _run_relu(region, step, b, lambda _: promise)
        region.watch.promise(y, promise)
    elif decision is not None and decision.codec == "rebuild":
        made = region.origins.are(decision.recipe[1], region.origins.key(x))
        y = _run_relu(region, step, b, None)
        if _stash_rebuilt(region, step, decision, y, made):
            recipe, lossy = decision.recipe, region.settings.lossy is not None
            number = 0 if lossy else known(region.verified, step.index, recipe, y)
            if number is not None:
                one_pass = number == 0 and fused(recipe, region.norms, region.kept) is not None
                _learn_relu(region, step, b, y, fused if one_pass else resolve)
    elif decision is not None and decision.mask:
        y = _run_relu(region, step, b, None)
        region.encode(y, decision)
    elif decision is not None and decision.codec not in ("mask1", "drop"):
        y = _shared_relu(region, step, b, decision)
    else:
        if decision is not None and step.choice.passes:
            region.cannot(decision, "the tensor has gaps, and the ReLU keeps a mask of its own")
        y = _run_relu(region, step, b, None)
        _place_own(region, decision, y)
        if decision is not None and decision.codec == "mask1" and not step.choice.passes:
            _learn_relu(region, step, b, y, None)
    region.mark_sparse(y)
    return y


def _learn_relu(region: Region, step: Step, b: Relu, y: torch.Tensor, bind: Any) -> None:
    mask = type(getattr(y.grad_fn, "kept", None)) is Coded
    overwritten = id(b.x) in region.watch.items
    if mask and type(b.x) is torch.Tensor and covers(y) and (overwritten or not step.choice.inplace):
        region.learnt = FastRelu(region, step, b, y, bind, overwritten)


def _place_own(region: Region, decision: Decision | None, y: torch.Tensor) -> None:
    """Bring what the op keeps for itself to where the plan wants it."""
    if decision is None or decision.codec in ("dense", "drop"):
        return
    kept = getattr(y.grad_fn, "kept", None)
    if kept is None:
        region.cannot(decision, "PyTorch's own op ran, for these operands are not ones that gistkit's takes")
    elif decision.place == "host":
        y.grad_fn.kept = AwayOnHost(kept)  # type: ignore[union-attr]


def _run_relu(region: Region, step: Step, b: Relu, keep: Any) -> torch.Tensor:
    x = b.x
    if b.inplace or not step.choice.inplace:
        return relu_op.run(x, b.inplace, keep)
    if not (region.overwrites and _overwritable(region, x)):
        region.cannot_run(step, "in the memory of its input", "somebody else may read that input")
        return relu_op.run(x, b.inplace, keep)
    y = overwrite_relu(x, keep=keep, nan=region.nan(x))
    region.watch.overwritten(x, step.index)
    return y


def _overwritable(region: Region, x: torch.Tensor) -> bool:
    return x.grad_fn is not None and not x._is_view() and covers(x) and region.table.find(x) is None


def _shared_relu(region: Region, step: Step, b: Relu, decision: Decision) -> torch.Tensor:
    """One stash serves the ReLU's backward and every later reader of its output."""
    if native.keeps_its_output(step, b):
        y = native.relu(b)
        region.alias(y, decision)
        region.learnt = FastDenseRelu(region, step, b, y) if FastDenseRelu.takes(region, step, b, y) else None
        return y
    made: list[Stash] = []

    def keep(y: torch.Tensor) -> Kept:
        stash = region.encode(y, decision)
        if stash is None:
            return Alias(y)
        made.append(stash)
        return Reader(stash, y)

    y = _run_relu(region, step, b, keep)
    if made:
        region.stashed(y, made[0])
    else:
        region.alias(y, decision)
    return y


def _stash_rebuilt(region: Region, step: Step, decision: Decision, y: torch.Tensor, made: bool) -> bool:
    """Record the recipe as y's stash if it gives y back; else stash y's values. Whether it does. ``made``: whether y's
    input came about as the recipe says."""
    term = resolve(decision.recipe, region.norms, region.kept) if made and covers(y) else None
    if term is not None:
        assert isinstance(term, ReluTerm)
        build = _exact(region, step, decision, y, term)
        if build is not None:
            plain = y.numel() * y.element_size()
            stash = Stash(
                RebuiltBody(build, y.numel() // y.shape[0]), decision.storage, "rebuild", plain, decision.reason
            )
            region.stashed(y, stash)
            return True
    why = NOT_EXACT if made else MADE_OTHERWISE
    region.cannot(decision, why)
    lossy = region.settings.lossy if region.program is None or region.program.bears_rounding(decision.storage) else None
    fallback = "zvc" if lossy is None else f"zvc+{lossy}"
    region.encode(y, Decision(decision.storage, fallback, reason=f"stored: {why}"))
    return False


def _exact(region: Region, step: Step, decision: Decision, y: torch.Tensor, term: ReluTerm) -> Build | None:
    """What rebuilds y exactly, or None; under a budget, where a second y has no room now, its first use finds out."""
    if region.settings.lossy is not None:
        return builder(ways(term)[0], y)
    later = (lambda: region.cannot(decision, NOT_EXACT)) if region.bound else None
    return exact(region.verified, step.index, decision.recipe, y, term, later)


def max_pool2d(region: Region, step: Step, b: MaxPool2d) -> torch.Tensor:
    """Max-pool: a map of 4 or 8 bits an output; it carries the ReLU's mask where the plan says so."""
    promise = region.watch.find(b.x)
    carries = promise is not None and step.choice.zero_code
    if promise is not None and not carries:
        promise.settle(b.x)
    region.unread = not carries  # PyTorch's own pool, should it run, reads only the shape of what it saves of x
    y = functional.max_pool2d(b.x, b.kernel_size, b.stride, b.padding, b.dilation, b.ceil_mode, mask_in_pool=carries)
    region.unread = False
    if promise is not None and carries:
        if getattr(getattr(y.grad_fn, "kept", None), "zero_code", False):
            promise.carry(y.grad_fn)
        else:
            promise.settle(b.x)
    if b.x.requires_grad:
        _place_own(region, step.own, y)
    if region.table.tagged(b.x):
        region.mark_sparse(y)
    return y


def conv2d(region: Region, step: Step, b: Conv2d) -> torch.Tensor:
    """Convolution: its input under the decision for that storage."""
    if native.takes_both_gradients(region, step, b):
        y = native.conv2d(region, step.input, b)
        region.learnt = FastConv2d(step, b, None) if FastConv2d.takes(b) else None
        return y
    keep = lambda t: region.keep(t, step.input)  # noqa: E731
    slices = region.slices(step)
    y = conv.run(b.x, b.weight, b.bias, b[3:], keep, slices, step.memo, step.choice.algorithm)
    if slices == 1 and not is_switched(step.choice.algorithm) and FastConv2d.takes(b):
        how = conv.prepared(step.memo, b.x, b.weight, b[3:])
        region.learnt = None if how is None else FastConv2d(step, b, how)
    return y


def linear(region: Region, step: Step, b: Linear) -> torch.Tensor:
    """Linear: its input under the decision for that storage."""
    keep = lambda t: region.keep(t, step.input)  # noqa: E731
    return functional.linear(b.x, b.weight, b.bias, keep=keep, weight_grad_slices=region.slices(step))


def batch_norm(region: Region, step: Step, b: BatchNorm) -> torch.Tensor:
    """Batch norm: its input under the decision; its statistics remembered where a recipe starts from it."""
    if step.feeds_recipe:
        try_drawn(region.verified, step.index, b)
    if step.input is not None and native.keeps_its_input(region, step.input, b):
        y, own = native.batch_norm(b)
        region.own.append((step.index, step.op, own))
        hold = region.alias(b.x, step.input)
        rebuild = None
        if step.feeds_recipe and len(own) > 1:
            rebuild = _remember_norm(region, step, b, y, hold, own[:2])
        if FastBatchNorm.takes(region, step, b):
            region.learnt = FastBatchNorm(region, step, b, rebuild, y)
        return y
    if step.input is not None and native.keeps_otherwise(region, step.input, b):
        return _coded_norm(region, step, b)
    kept: list[Kept] = []
    found: list[Stats] = []

    def keep(t: torch.Tensor) -> Kept:
        kept.append(region.keep(t, step.input))
        return kept[0]

    y = norm.run(*b, keep, lambda mean, invstd: found.append((mean, invstd)))
    if step.feeds_recipe and kept and found:
        _remember_norm(region, step, b, y, kept[0], found[0])
    return y


def _coded_norm(region: Region, step: Step, b: BatchNorm) -> torch.Tensor:
    """A batch norm by PyTorch's node, which keeps what is planned of its input."""
    y, own = native.batch_norm(b)
    region.own.append((step.index, step.op, own))
    kept = region.keep(b.x, step.input)
    native.replace_input(y, kept)
    rebuild = None
    if step.feeds_recipe and len(own) > 1:
        rebuild = _remember_norm(region, step, b, y, kept, own[:2])
    if FastCodedBatchNorm.takes(b):
        region.learnt = FastCodedBatchNorm(region, step, b, rebuild, y)
    return y


def _remember_norm(
    region: Region, step: Step, b: BatchNorm, y: torch.Tensor, kept: Kept, stats: Stats
) -> norm.Rebuild | None:
    region.origins.made("bn", step.index, y)
    rebuild = arithmetic(region.verified, step.index, b, y, stats)
    if rebuild is not None:
        apply, own = norm.bound(rebuild, b.x, *stats, b.weight, b.bias)
        region.own.append((step.index, step.op, own))
        region.norms[step.index] = BatchNormTerm(kept, apply)
    return rebuild


def dropout(region: Region, step: Step, b: Dropout) -> torch.Tensor:
    """Dropout: a mask of 1 bit an element."""
    y = functional.dropout(b.x, b.p, b.training, b.inplace)
    if b.training and b.x.requires_grad:
        _place_own(region, step.own, y)
    if b.training and region.table.tagged(b.x):
        region.mark_sparse(y)
    return y


HANDLERS = {
    "relu": relu,
    "max_pool2d": max_pool2d,
    "conv2d": conv2d,
    "linear": linear,
    "batch_norm": batch_norm,
    "dropout": dropout,
}
