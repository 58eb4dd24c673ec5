"""What an operator's node makes and keeps for itself: a pool's map, a dropout's bits."""

from __future__ import annotations

from typing import Any

from gistkit.ir import Decision
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.offload.host import AwayOnHost
from gistkit.runtime.program.program import Step


def place_own(state: ForwardState, step: Step, decision: Decision | None, y: Any) -> None:
    """Bring what y's node keeps for itself to where the plan wants it, and record it."""
    kept = getattr(y.grad_fn, "kept", None)
    if decision is not None and decision.form.payload and decision.codec != "dense":
        if kept is None:
            state.cannot(decision, "PyTorch's own op ran, for these operands are not ones that gistkit's takes")
        elif decision.on_host:
            y.grad_fn.kept = kept = AwayOnHost(kept)
    state.record_own(step.index, step.op, kept)
