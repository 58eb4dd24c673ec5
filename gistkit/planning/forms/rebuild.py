"""ReLU outputs that need not be kept: ReLU(BN(x)) and ReLU(BN(x) + y) follow from what batch norm keeps anyway.

Gist keeps every feature map in some form; this rule goes beyond it (docs/design.md). It holds where the ReLU's input is
a training batch norm's output, or a plain addition (alpha 1, equal shapes and dtypes) of such outputs and of storages
that are kept with their values. A chain through rebuilt storages is cut after :data:`MAX_DEPTH`, or backward would
repeat more and more of the forward. In-place calls do no harm: what is rebuilt starts from kept inputs, never from
overwritten outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gistkit.ir import Call, Decision, Reading, Value

MAX_DEPTH = 2
WITHOUT_VALUES = ("mask1", "drop", "bits")


@dataclass(frozen=True)
class Recipe:
    """How a storage comes back: nested tuples as in :class:`Decision`, the storages it starts from, its depth."""

    steps: tuple
    sources: tuple[int, ...]


def recipe_of(relu: Call, reading: Reading, decide: Callable[[int], Decision | None]) -> Recipe | None:
    """The recipe for a ReLU's output, None where there is none; ``decide`` gives the decision for another storage."""
    found = _term(reading.operand(relu), reading, decide)
    return None if found is None else Recipe(("relu", found.steps), tuple(sorted(set(found.sources))))


def _term(value: Value, reading: Reading, decide: Callable) -> Recipe | None:
    call = reading.maker(value)
    if call is None or call.covered < 0 or not value.whole:
        return None
    if call.op == "batch_norm":
        return _norm(call, reading, decide)
    if call.op != "add" or len(call.operands) != 2 or call.options is None or call.options["alpha"] != 1:
        return None
    terms = []
    for operand in (reading.operand(call, 0), reading.operand(call, 1)):
        if (operand.shape, operand.dtype) != (value.shape, value.dtype):
            return None
        terms.append(_addend(operand, reading, decide))
    if any(t is None for t in terms):
        return None
    return Recipe(("add", *(t.steps for t in terms)), tuple(s for t in terms for s in t.sources))


def _addend(value: Value, reading: Reading, decide: Callable) -> Recipe | None:
    call = reading.maker(value)
    if call is not None and call.op == "batch_norm" and call.covered >= 0:
        return _norm(call, reading, decide)
    saved = reading.saved(value.storage)
    if saved is None or saved.version != value.version or saved.shape != value.shape or not value.whole:
        return None
    return _stash(value.storage, decide)


def _norm(call: Call, reading: Reading, decide: Callable) -> Recipe | None:
    """A training batch norm that keeps its input."""
    operand = reading.operand(call)
    keeps = any(s.value == operand.id and s.read for s in call.saves)
    if not keeps or not (call.options or {}).get("training"):
        return None
    stash = _stash(operand.storage, decide)
    return None if stash is None else Recipe(("bn", call.covered), stash.sources)


def _stash(storage: int, decide: Callable) -> Recipe | None:
    decision = decide(storage)
    if decision is None or decision.codec in WITHOUT_VALUES:
        return None
    return Recipe(("stash", storage), (storage,))


def depth(decision: Decision | None, decide: Callable[[int], Decision | None]) -> int:
    """How many rebuilt storages, one behind the other, have to come back before this one is there."""
    if decision is None or decision.codec != "rebuild":
        return 0
    return 1 + max((depth(decide(s), decide) for s in decision.sources), default=0)
