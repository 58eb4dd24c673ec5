"""What a forward says where it cannot do as its plan says: a note in the report, an error under a promise."""

from __future__ import annotations

from gistkit.errors import PlanError, PlanMismatchError
from gistkit.ir import Decision
from gistkit.runtime.program.program import Program


def not_as_planned(decision: Decision, why: str) -> str:
    """The report's note on a storage whose decision is not carried out."""
    return f"not {decision.codec}{_at(decision)} as planned: {why}"


def cannot_keep(decision: Decision, program: Program | None, why: str) -> PlanError:
    """The error of such a storage under a budget; the program tells where it comes from."""
    op, module, shape = program.origin(decision.storage) if program else ("", "", ())
    return PlanError(
        f"the plan's budget cannot be kept: storage {decision.storage} ({op} of {module or 'the model'}, shape "
        f"{shape}) was to be {decision.codec!r}{_at(decision)}, and {why}; take another policy or "
        "class of moves, or no budget"
    )


def left(expected: str, got: str) -> PlanMismatchError:
    """The error of a forward that left the caller's plan."""
    remedy = "plan this model again, or call gistkit.compress(model) without a plan"
    return PlanMismatchError(expected, got, remedy)


def _at(decision: Decision) -> str:
    return " on the host" if decision.on_host else ""
