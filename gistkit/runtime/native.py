"""Covered calls that PyTorch's own op carries out just as planned, with a backward node of its own.

Such a node costs the host next to nothing in backward, a Python one 10 to 20 us, and a ResNet-50 has 53 of each kind:

| call | as planned by itself where | how it runs |
|---|---|---|
| batch norm | its input stays dense | PyTorch keeps the input with its own check |
| convolution | its input gradient may be taken beside the input | its saved input replaced by what is planned |

Both run outside the region's hooks, which would be asked for what a node saves besides its input too: statistics, and a
convolution's weight, for which backward would wait for Python once more. A convolution's saved input gets the hooks
when it has run.

A convolution's node takes both gradients in one call and holds the decoded input meanwhile, which is more memory than
the weight gradient first (:mod:`gistkit.nn.conv`). So it is for inputs of up to ``JOINT_BYTES``, or where no input
gradient is asked for, and never where a plan of the caller's promises a peak.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gistkit.graph.calls import BatchNorm, Conv2d
from gistkit.kernels.layout import is_dense
from gistkit.nn.switched import is_switched
from gistkit.plan.plan import Decision
from gistkit.runtime.program import Step
from gistkit.runtime.region import Region

_autograd = torch._C._autograd  # type: ignore[attr-defined]
JOINT_BYTES = {"cuda": 32 * 2**20}
"""Inputs of at most so many bytes, by device type."""
MEAN, INVSTD, RESERVE = "_saved_result1", "_saved_result2", "_saved_result3"
"""Where a node of PyTorch's batch norm has mean, 1/std and, of some libraries, a reserve."""


def keeps_its_input(region: Region, decision: Decision, b: BatchNorm) -> bool:
    """Whether PyTorch's own batch norm does as the plan says: the input stays, and nobody stashed it already."""
    if decision.codec != "dense" or decision.place == "host" or region.tape is not None:
        return False
    x, affine = b.x, b.weight
    recorded = x.requires_grad or (affine is not None and affine.requires_grad)
    trains = b.training and recorded and x.dim() > 1 and x.numel() > x.shape[1] and is_dense(x)
    return trains and region.table.find(x) is None


def batch_norm(b: BatchNorm) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """PyTorch's training batch norm outside the region's hooks: (output, what its node keeps besides the input)."""
    pack, unpack = _autograd._top_saved_tensors_default_hooks(False)
    _autograd._pop_saved_tensors_default_hooks()
    try:
        enabled = torch._C._get_cudnn_enabled()
        y = torch.batch_norm(b.x, b.weight, b.bias, b.running_mean, b.running_var, True, b.momentum, b.eps, enabled)
    finally:
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
    node: Any = y.grad_fn
    mean, invstd = getattr(node, MEAN, None), getattr(node, INVSTD, None)
    if mean is None or invstd is None:
        return y, ()
    reserve = getattr(node, RESERVE, None)
    return y, (mean, invstd) if reserve is None else (mean, invstd, reserve)


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
    small = x.numel() * x.element_size() <= JOINT_BYTES.get("cuda" if x.is_cuda else "cpu", 0)
    return (small or not x.requires_grad) and is_dense(x)


def conv2d(region: Region, decision: Decision | None, b: Conv2d) -> torch.Tensor:
    """PyTorch's convolution, what it saves of its input under the plan's decision."""
    pack, unpack = _autograd._top_saved_tensors_default_hooks(False)
    _autograd._pop_saved_tensors_default_hooks()
    try:
        y = torch.conv2d(b.x, b.weight, b.bias, b.stride, b.padding, b.dilation, b.groups)
    finally:
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
    y.grad_fn._raw_saved_input.register_hooks(partial(region.keep, decision=decision), unpack)  # type: ignore[union-attr]
    return y
