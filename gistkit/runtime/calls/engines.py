"""Which of the engines of cuDNN that a plan names for a convolution run it over the operands at hand."""

from __future__ import annotations

import torch

from gistkit.capture import Conv2d
from gistkit.errors import PlanError
from gistkit.kernels import ENGINE, PARTS, conv_task, engines, engines_missing
from gistkit.nn.conv import Prepared
from gistkit.planning.cost import of_part
from gistkit.runtime.calls.kinds import autocast_dtype
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.program.program import Step


def taken(state: ForwardState, step: Step, call: Prepared, b: Conv2d) -> dict[str, str]:
    """By part the engines of the step's choice that can run the call. The others leave it to PyTorch, with a line in
    the report; under a budget, which counts their workspace, PlanError."""
    algorithm = step.choice.algorithm
    if ENGINE not in algorithm:
        return {}
    named = {part: name for part in PARTS if (name := of_part(algorithm, part)).startswith(ENGINE)}
    missing = {part: why for part, name in named.items() if (why := _why_not(call, b, part, name))}
    module = (state.program.covered[step.index].module if state.program else "") or "a convolution of the model"
    for part, why in missing.items():
        if state.bound:
            raise PlanError(
                f"the plan's budget cannot be kept: {module} was to run its {part} by cuDNN's {named[part]}, and "
                f"{why}; plan again on this machine, or take no budget"
            )
        state.remarks.append(f"{module}: {part} by PyTorch's own algorithm, not cuDNN's {named[part]}: {why}")
    found = {part: name for part, name in named.items() if part not in missing}
    if found:
        shown = ", ".join(f"{part} {name}" for part, name in found.items())
        state.remarks.append(f"{module}: by cuDNN's engines: {shown}")
    return found


def _why_not(call: Prepared, b: Conv2d, part: str, name: str) -> str:
    if missing := engines_missing():
        return missing
    if b.x.dim() != 4 or call.uneven is not None:
        return "it takes a batch of images padded evenly alone"
    channels_last = call.geometry.memory_format(b.x, b.weight) is torch.channels_last
    kind = autocast_dtype(b.x) or b.x.dtype, b.x.device
    known = engines(conv_task(part, b.x.shape, b.weight.shape, call.geometry[:3], *kind, channels_last))
    if name in {engine.name for engine in known}:
        return ""
    return f"cuDNN has {', '.join(engine.name for engine in known) or 'none'} for it here"
