"""Covered calls that PyTorch's own op carries out just as planned, with a backward node of its own.

Such a node costs the host next to nothing in backward, a Python one 10 to 20 us, and a ResNet-50 has 53 of each kind:

| call | as planned by itself where | how it runs |
|---|---|---|
| batch norm | its input stays dense | PyTorch keeps the input with its own check |
| ReLU | its output stays dense | PyTorch keeps the output with its own check |
| batch norm | its input is kept otherwise | its saved input replaced by what is planned |
| convolution | its input gradient may be taken beside the input | its saved input replaced by what is planned |

All run outside the region's hooks, which would be asked for what a node saves besides its input too: statistics, and a
convolution's weight, for which backward would wait for Python once more. A saved input gets its hooks when the call has
run. A batch norm's lets go of what was kept when it is unpacked (:class:`Once`), so that its node holds no more beside
the gradients than gistkit's own does.

A convolution's node takes both gradients in one call and holds the decoded input meanwhile, which is more memory than
the weight gradient first (:mod:`gistkit.nn.conv`). So it is for inputs of up to ``JOINT_BYTES``, for those with as much
room as later calls have let go of by then (:mod:`gistkit.runtime.program.joint_gradients`), or where no input gradient
is asked for, and never where a plan of the caller's promises a peak.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import torch

from gistkit.capture import BatchNorm, Conv2d, Relu
from gistkit.ir import Decision
from gistkit.kernels import is_dense
from gistkit.nn.eligible import overwritable
from gistkit.nn.keep import USED_TWICE, Alias, Kept, is_retained
from gistkit.nn.switched import is_switched
from gistkit.runtime.calls.one_pass import OnePassBody
from gistkit.runtime.forward.state import Region
from gistkit.runtime.program.program import Step
from gistkit.runtime.stash.stash import Reader

Hooks = tuple[Callable, Callable]
"""A pair of saved-tensor hooks."""
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks  # type: ignore[attr-defined]
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks  # type: ignore[attr-defined]
_dense = methodcaller("dense")
JOINT_BYTES = {"cuda": 32 * 2**20}
"""Inputs of at most so many bytes, by device type; where there is none, no input goes that way."""


def keeps_its_input(region: Region, decision: Decision, b: BatchNorm) -> bool:
    """Whether PyTorch's own batch norm does as the plan says: the input stays, and nobody stashed it already."""
    if decision.codec != "dense" or decision.place == "host":
        return False
    return _trains(b) and region.table.find(b.x) is None


def keeps_its_output(step: Step, b: Relu) -> bool:
    """Whether PyTorch's own ReLU, of an x that needs a gradient, does as the plan says: the output stays."""
    decision = step.output
    if decision is None or decision.codec != "dense" or decision.place == "host" or decision.mask:
        return False
    if not b.inplace:
        return b.x.numel() > 0
    return overwritable(b.x) and is_dense(b.x) and b.x.numel() > 0


def keeps_otherwise(region: Region, decision: Decision, b: BatchNorm) -> bool:
    """Whether PyTorch's own batch norm does as the plan says, once its saved input is replaced."""
    if decision.codec in ("dense", "recompute") or decision.place == "host" or region.strict or region.tape is not None:
        return False
    return b.x.requires_grad and _trains(b)


def _trains(b: BatchNorm) -> bool:
    x, affine = b.x, b.weight
    recorded = x.requires_grad or (affine is not None and affine.requires_grad)
    return b.training and recorded and x.dim() > 1 and x.numel() > x.shape[1] and is_dense(x)


def rectified(hooks: Hooks, x: torch.Tensor, inplace: bool) -> torch.Tensor:
    """PyTorch's ReLU outside the region's hooks, which are ``hooks``."""
    _pop_hooks()
    try:
        return torch.relu_(x) if inplace else torch.relu(x)
    finally:
        _push_hooks(*hooks)


def relu(b: Relu) -> torch.Tensor:
    """:func:`rectified` in the region whose hooks are on top."""
    return rectified(_top_hooks(False), b.x, b.inplace)


class Once:
    """What a node's saved input is replaced by: a hold that is let go of when it is unpacked, unless the graph is
    retained."""

    __slots__ = ("_kept",)

    def __init__(self, kept: Kept) -> None:
        self._kept: Kept | None = kept

    def __call__(self, x: torch.Tensor) -> Once:
        """Itself: what a saved-tensor hook makes of x."""
        return self

    def dense(self) -> torch.Tensor:
        """The tensor; raises PyTorch's own error where it has been let go of."""
        kept = self._kept
        if kept is None:
            raise RuntimeError(USED_TWICE)
        if not is_retained():
            self._kept = None
        return kept.dense()


def replace_input(y: Any, kept: Kept) -> None:
    """Have y's node hold that for its saved input; where it is the tensor itself, PyTorch's own hold does."""
    if type(kept) is not Alias:
        y.grad_fn._raw_saved_input.register_hooks(Once(kept), _dense)


def batch_norm(b: BatchNorm) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """PyTorch's training batch norm outside the region's hooks: (output, what its node keeps besides the input: mean,
    1/std and, of some libraries, a reserve)."""
    running = (b.running_mean, b.running_var, b.momentum, b.eps)
    y, mean, invstd, reserve = trained(_top_hooks(False), b.x, b.weight, b.bias, running, torch._C._get_cudnn_enabled())
    return y, (mean, invstd, reserve) if reserve.numel() else (mean, invstd)


def trained(hooks: Hooks, x: torch.Tensor, weight: Any, bias: Any, running: tuple, cudnn: bool) -> tuple:
    """:func:`batch_norm`, the region's hooks being ``hooks``: (output, mean, 1/std, reserve)."""
    mean, var, momentum, eps = running
    _pop_hooks()
    try:
        # what torch.batch_norm calls, of which it gives the output alone away
        return torch._batch_norm_impl_index(x, weight, bias, mean, var, True, momentum, eps, cudnn)[:4]
    finally:
        _push_hooks(*hooks)


def takes_both_gradients(region: Region, step: Step, b: Conv2d) -> bool:
    """Whether PyTorch's own convolution keeps its input as well as gistkit's would."""
    x, weight = b.x, b.weight
    if region.strict or region.tape is not None or region.settings.slices > 1:
        return False
    if type(weight) is not torch.nn.Parameter or not weight.requires_grad:
        return False
    if type(b.padding) is not tuple or x.dim() != 4 or not x.numel():
        return False
    if step.choice.algorithm and is_switched(step.choice.algorithm):
        return False
    return is_dense(x) and (not x.requires_grad or _has_room(region, step.index, x))


def _has_room(region: Region, index: int, x: torch.Tensor) -> bool:
    """Whether the decoded input of a convolution may lie beside both gradients."""
    limit, nbytes = JOINT_BYTES.get(x.device.type), x.numel() * x.element_size()
    found = None if limit is None or region.program is None else region.program.headrooms.get(index)
    return limit is not None and (nbytes <= limit or (found is not None and found.suffices(nbytes)))


def conv2d(region: Region, decision: Decision | None, b: Conv2d) -> torch.Tensor:
    """PyTorch's convolution, what it saves of its input under the plan's decision."""
    return convolved(region, decision, _top_hooks(False), *b)


def convolved(
    region: Region, decision: Decision | None, hooks: Hooks, x: torch.Tensor, weight: Any, bias: Any, *options: Any
) -> torch.Tensor:
    """:func:`conv2d`, the region's hooks being ``hooks``."""
    _pop_hooks()
    try:
        y: Any = torch.conv2d(x, weight, bias, *options)
    finally:
        _push_hooks(*hooks)
    # autocast's copy of x, which is saved then, is another tensor
    stash = region.table.find(x) if y.dtype is x.dtype else None
    if stash is None:
        pack: Any = partial(region.keep, decision=decision)
    else:
        body = stash.body
        pack = body if type(body) is OnePassBody and body.is_like(x) else partial(Reader, stash)
    y.grad_fn._raw_saved_input.register_hooks(pack, _dense)
    return y
