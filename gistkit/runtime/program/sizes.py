"""The sizes of forwards under a budget: which were captured, and the programs of those that are not the largest.

What PyTorch's own ops save is known by its shape (:meth:`gistkit.runtime.program.program.Program.uncovered`). A
forward of
fewer rows than the one that was captured, as an epoch's last batch and the last of uneven sub-batches are, has other
shapes, so it is captured as well, or all of that would stay as it is. Some models take another way for few rows, which
no decision is made for: such a forward runs as plain PyTorch, whatever came before it, and is told. So a size is also
captured where nothing is known by its shape, once, to know its way.
"""

from __future__ import annotations

import random
import re
import warnings

import torch

from gistkit.capture import batch_size, capture, row_bytes, tensors_in
from gistkit.errors import BudgetWarning, CaptureError, PlanMismatchError
from gistkit.ir import Plan
from gistkit.planning.cost import PRESETS, cost_table
from gistkit.planning.policies import POLICIES
from gistkit.runtime.program.match_plan import Shapes, given_program, shapes, with_planned_rows, within
from gistkit.runtime.program.program import Program

MOST = 64
"""Programs of forwards other than the largest that are held at a time. Which one goes for another is drawn: if the one
not used for longest went, a few sizes more than these in turn would never find theirs."""

SEEN = 4096
"""Sizes of which only the way is known, and no program held; the first seen goes."""

Forward = tuple[torch.nn.Module, tuple, dict]
"""A model, its positional arguments and its named ones."""


class Sizes:
    """Of one model under a plan with a budget, by kind of forward. ``notes`` are the report's, to which it adds."""

    def __init__(self, plan: Plan, notes: list[str]) -> None:
        self._plan, self._notes = plan, notes
        self._known: dict[tuple, list[Shapes]] = {}
        self._others: dict[tuple[tuple, Shapes], Program] = {}
        self._seen: dict[tuple[tuple, Shapes], None] = {}
        self._told: set[tuple[int, bool]] = set()
        self._draw = random.Random(0)
        self._warned = False

    def programs(
        self, key: tuple, known: Program | None, model: torch.nn.Module, args: tuple, kwargs: dict
    ) -> tuple[Program, Program]:
        """The kind's own program, where ``known`` was it, and the program of a forward of this size. Raises
        PlanMismatchError where the model would not be the planned one with the planned rows either."""
        now, forward = shapes(args, kwargs), (model, args, kwargs)
        own = self._own(key, now, known, forward)
        return own, self._of_size(key, now, own, forward)

    def _own(self, key: tuple, now: Shapes, known: Program | None, forward: Forward) -> Program:
        """The kind's own program: ``known``, or that of this forward where it is larger in some dimension than all
        before it, as its capture asks whether it may be; ``known`` stays what its size runs by. Of a forward of few
        rows that goes another way it is that of the planned rows, so that what comes first does not matter."""
        sizes = self._known.setdefault(key, [])
        if known is not None and any(within(now, size) for size in sizes):
            return known
        try:
            found, size = given_program(self._plan, *forward), now
        except PlanMismatchError as error:
            found, size = self._of_planned_rows(error, forward)
            self._hold(key, now, self._another_way(error, *forward))
        if known is not None and known.goes_by_shapes and sizes:
            self._hold(key, sizes[-1], known)
        sizes.append(size)
        return found

    def _of_size(self, key: tuple, now: Shapes, own: Program, forward: Forward) -> Program:
        sizes = self._known[key]
        if sizes[-1] == now or (not own.goes_by_shapes and (now in sizes or (key, now) in self._seen)):
            return own
        found = self._others.pop((key, now), None)
        if found is None:
            try:
                found = given_program(self._plan, *forward)
            except PlanMismatchError as error:
                self._of_planned_rows(error, forward)
                found = self._another_way(error, *forward)
        if found.plan is self._plan and not own.goes_by_shapes:
            self._see(key, now)
            return own
        self._hold(key, now, found)
        return found

    def _hold(self, key: tuple, now: Shapes, program: Program) -> None:
        self._others.pop((key, now), None)
        if len(self._others) >= MOST:
            del self._others[self._draw.choice(list(self._others))]
        self._others[key, now] = program

    def _see(self, key: tuple, now: Shapes) -> None:
        if len(self._seen) >= SEEN:
            del self._seen[next(iter(self._seen))]
        self._seen[key, now] = None

    def _of_planned_rows(self, error: PlanMismatchError, forward: Forward) -> tuple[Program, Shapes]:
        """The program and the size of the forward with the planned rows. Where that is not the planned one either,
        raises PlanMismatchError for what is another in it, which the way of the few rows may hide; ``error``, theirs,
        where that says the same, or no forward with the planned rows can be captured."""
        with_more, (model, args, kwargs) = None, forward
        for larger in with_planned_rows(self._plan, args, kwargs):
            try:
                return given_program(self._plan, model, *larger), shapes(*larger)
            except PlanMismatchError as mismatch:
                if with_more is None and not isinstance(mismatch.__cause__, CaptureError):
                    with_more = mismatch
        if with_more is None or _but_numbers(with_more) == _but_numbers(error):
            raise error
        got = f"{with_more.got}, with as many rows as planned"
        raise PlanMismatchError(with_more.expected, got, with_more.remedy) from None

    def _another_way(self, error: PlanMismatchError, model: torch.nn.Module, args: tuple, kwargs: dict) -> Program:
        """The program of a forward that PyTorch runs by itself, which is told: a note where that fits the budget, a
        BudgetWarning, once a model, where it may not. One note for each number of rows says it of all their shapes."""
        try:
            graph = capture(model, args, kwargs, on_cpu=True)
            over_bytes = _peak_bytes(self._plan, model, args, kwargs) - _limit_bytes(self._plan)
        except CaptureError:
            raise error from None
        rows = batch_size((args, kwargs))
        told = f"a forward of {rows} row{'' if rows == 1 else 's'} goes another way than the plan, as plain PyTorch"
        told += f", for which the budget {'has room' if over_bytes <= 0 else 'may have none'}: "
        told += f"expected {error.expected}, got {error.got}"
        if (rows, over_bytes > 0) not in self._told:
            self._told.add((rows, over_bytes > 0))
            self._notes.append(told)
        if over_bytes > 0 and not self._warned:
            self._warned = True
            remedy = "leave batches of so few rows out, as drop_last=True does, or plan with so many bytes more"
            over = f"the budget of {self._plan.budget_bytes} bytes may be exceeded by up to about {over_bytes}"
            warnings.warn(f"{over}: {told}; {remedy}", BudgetWarning, stacklevel=2)
        kept = graph.kept_bytes
        made = Plan("plain", graph.fingerprint, (), (), plain_bytes=kept, kept_bytes=kept, hardware=self._plan.hardware)
        return Program(graph, made, given=True)


def _but_numbers(error: PlanMismatchError) -> str:
    return re.sub(r"\d+", "", str(error))


def _limit_bytes(plan: Plan) -> int:
    """What such a forward may take: the budget; of a plan in sub-batches what it predicts, as a larger batch than the
    planned one is held in what is left."""
    most = plan.peak_bytes if plan.sub_batches > 1 else plan.budget_bytes or 0
    return most - plan.contract.reserved_bytes


def _peak_bytes(plan: Plan, model: torch.nn.Module, args: tuple, kwargs: dict) -> int:
    """The most that plain PyTorch holds in a step of this forward. The loss is not known: one that keeps two tensors of
    the results' size, as a cross entropy does not quite, with targets of that size. With sub-batches also the gradients
    of those before it and the inputs of the others. Raises CaptureError."""
    targets_bytes = 0

    def loss_fn(out: object) -> torch.Tensor:
        nonlocal targets_bytes
        results = [t for t in tensors_in(out) if t.requires_grad]
        targets_bytes = sum(t.numel() * t.element_size() for t in results)
        return torch.stack([t.exp().exp().mean().float() for t in results]).sum()

    graph = capture(model, args, kwargs, backward=True, loss_fn=loss_fn)
    tensors = [*model.parameters(), *tensors_in([args, kwargs])]
    device = "h200" if any(t.device.type == "cuda" for t in tensors) else "cpu"
    costs = cost_table(graph, PRESETS.get(plan.hardware, PRESETS[device]))
    peak_bytes = POLICIES["plain"](graph, costs).peak_bytes + targets_bytes
    if plan.sub_batches == 1:
        return peak_bytes
    others = max(0, plan.contract.batch - batch_size((args, kwargs)))
    gradients_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return peak_bytes + gradients_bytes + others * row_bytes((args, kwargs))


__all__ = ["Sizes"]
