"""ReLU outputs that need not be kept: ReLU(BN(x)) and ReLU(BN(x) + y) follow from what batch norm keeps anyway.

This goes beyond Gist (docs/concepts.md). It holds where the input is a training batch norm's output, or a plain
addition (alpha 1, equal shapes and dtypes) of such outputs and of storages that are kept with their values. A chain
through rebuilt storages is cut after :data:`MAX_DEPTH`. In-place calls do no harm: a rebuild starts from kept inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gistkit.ir import OPERATORS, Call, Decision, Reading, Value

MAX_DEPTH = 2
Decide = Callable[[int], Decision | None]
"""Gives the decision for a storage, None where it is not kept."""


@dataclass(frozen=True)
class Recipe:
    """How a storage comes back: nested tuples as in :class:`Decision`, and the storages that they start from."""

    steps: tuple
    sources: tuple[int, ...]


def recipe_of(relu: Call, reading: Reading, decide: Decide) -> Recipe | None:
    """The recipe for a ReLU's output, None where there is none; ``decide`` gives the decision for another storage."""
    found = _term(reading.operand(relu), reading, decide)
    return None if found is None else Recipe(("relu", found.steps), tuple(sorted(set(found.sources))))


def depth(decision: Decision | None, decide: Decide) -> int:
    """How many rebuilt storages, one behind the other, have to come back before this one is there."""
    if decision is None or decision.form.returns != OPERATORS:
        return 0
    return 1 + max((depth(decide(s), decide) for s in decision.sources), default=0)


def circular(storage: int, decide: Decide, above: tuple[int, ...] = ()) -> bool:
    """Whether what a storage is rebuilt from is rebuilt from that storage."""
    decision = decide(storage)
    if decision is None or decision.form.returns != OPERATORS:
        return False
    return storage in above or any(circular(s, decide, (*above, storage)) for s in decision.sources)


def _term(value: Value, reading: Reading, decide: Decide) -> Recipe | None:
    call = reading.maker(value)
    if call is None or call.covered < 0 or not value.whole:
        return None
    if call.op == "batch_norm":
        return _norm(call, reading, decide)
    if call.op != "add" or len(call.operands) != 2 or call.options is None or call.options["alpha"] != 1:
        return None
    operands = [reading.operand(call, position) for position in (0, 1)]
    if any((operand.shape, operand.dtype) != (value.shape, value.dtype) for operand in operands):
        return None
    left, right = (_addend(operand, reading, decide) for operand in operands)
    if left is None or right is None:
        return None
    return Recipe(("add", left.steps, right.steps), left.sources + right.sources)


def _addend(value: Value, reading: Reading, decide: Decide) -> Recipe | None:
    call = reading.maker(value)
    if call is not None and call.op == "batch_norm" and call.covered >= 0:
        return _norm(call, reading, decide)
    saved = reading.saved(value.storage)
    if saved is None or saved.version != value.version or saved.shape != value.shape or not value.whole:
        return None
    return _kept(value.storage, decide)


def _norm(call: Call, reading: Reading, decide: Decide) -> Recipe | None:
    operand = reading.operand(call)
    keeps = any(s.value == operand.id and s.read for s in call.saves)
    if not keeps or not (call.options or {}).get("training"):
        return None
    source = _kept(operand.storage, decide)
    return None if source is None else Recipe(("bn", call.covered), source.sources)


def _kept(storage: int, decide: Decide) -> Recipe | None:
    decision = decide(storage)
    return None if decision is None or not decision.form.values else Recipe(("stash", storage), (storage,))
