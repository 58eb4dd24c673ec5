"""Plans of the policy ``plain`` that a caller gives: PyTorch runs by itself, as they predict it.

None of gistkit's operators, whose own maps and masks such a plan does not count, and no hook: every node is PyTorch's.
What is left is to see that the forward is the planned one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gistkit.capture import COVERED, bind, hooks_are_active, is_counted
from gistkit.ir import Plan
from gistkit.planning.simulate import PLAIN_POLICIES
from gistkit.runtime.forward.state import Region
from gistkit.runtime.program.program import Program
from gistkit.runtime.program.stats import Observed

WHY = "PyTorch's own operators run, as the plan says; its size as captured"


def runs_plain(plan: Plan | None) -> bool:
    """Whether a plan says no more than that PyTorch shall run by itself."""
    return plan is not None and plan.policy in PLAIN_POLICIES and not plan.decisions and not plan.choices


class Counter(TorchFunctionMode):
    """Counts the covered calls of a forward that PyTorch carries out, as the region's plan has them."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    def __torch_function__(self, func: Any, _: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        op = None if torch.compiler.is_compiling() else COVERED.get(func)
        if op is not None and torch.is_grad_enabled() and not hooks_are_active():
            bound = bind(op, func, args, kwargs)
            if bound is not None and is_counted(bound):
                self.region.next_step(op, bound)
        return func(*args, **kwargs)


def as_captured(program: Program) -> Observed:
    """What a forward keeps that PyTorch carried out, by its capture."""
    kept = tuple((s.id, "dense", s.nbytes, s.nbytes, WHY) for s in program.graph.kept())
    return Observed(program, kept, ())


__all__ = ["Counter", "as_captured", "runs_plain"]
