"""Plans of the policy ``plain`` that a caller gives: PyTorch runs by itself, as they predict it.

None of gistkit's operators, whose own maps and masks such a plan does not count, and no hook: every node is PyTorch's.
What is left is to see that the forward is the planned one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gistkit.capture import COVERED, bind, hooks_are_active, is_counted
from gistkit.runtime.calls.run import next_call
from gistkit.runtime.forward.state import ForwardState


class Counter(TorchFunctionMode):
    """Counts the covered calls of a forward that PyTorch carries out, as the plan has them."""

    def __init__(self, state: ForwardState) -> None:
        super().__init__()
        self.state = state

    def __torch_function__(self, func: Any, _: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        op = None if torch.compiler.is_compiling() else COVERED.get(func)
        if op is not None and torch.is_grad_enabled() and not hooks_are_active():
            bound = bind(op, func, args, kwargs)
            if bound is not None and is_counted(bound):
                next_call(self.state, op, bound)
        return func(*args, **kwargs)
