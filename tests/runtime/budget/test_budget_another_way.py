"""Forwards of few rows that go another way through a model than the planned ones: told, and run as plain PyTorch,
whatever came before them; parts of a step that do are refused."""

import copy
import functools
import itertools
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.errors import BudgetWarning, PlanMismatchError
from gistkit.ir.contract import Contract
from gistkit.ir.plan import Plan
from gistkit.runtime.step.step import _parts
from tests.support.peaks import held_step, peaks_of_steps

ROWS = 8
LABELS = torch.arange(12) % 5


class Alone(nn.Module):
    """Convolutions with SiLUs; a single row goes through ``way`` behind the first ``after`` of them. ``scale`` is of
    one row whatever the batch."""

    silu = F.silu

    def __init__(self, way, after=6):
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(nn.Conv2d(8 if i else 3, 8, 3, padding=1) for i in range(6))
        self.head, self.way, self.after = nn.Linear(8, 5), way, after

    def forward(self, x, scale=None):
        for i, conv in enumerate(self.convs):
            x = self.way(x) if len(x) == 1 and i == self.after else x
            x = type(self).silu(conv(x))
        x = self.way(x) if len(x) == 1 and self.after == len(self.convs) else x
        x = x.mean((2, 3))
        return self.head(x if scale is None else x * scale)


def many(x, maps=60):
    """Keeps so many maps."""
    return torch.stack([(x * i).sin() for i in range(maps)]).sum(0)


@functools.cache
def least(fidelity="bitwise", scaled=False, more=1.0):
    """The plan of the least budget, or of so much more; which way a single row goes is nothing to it."""
    model, x = Alone(torch.sin), torch.zeros(ROWS, 3, 16, 16)
    given = (x, torch.zeros(1, 8)) if scaled else x
    asked = {"loss_fn": F.cross_entropy, "density": 1.0, "fidelity": fidelity}
    with pytest.raises(gistkit.BudgetError) as refused:
        gistkit.plan(model, given, LABELS[:ROWS], budget=1, **asked)
    return gistkit.plan(model, given, LABELS[:ROWS], budget=int(refused.value.least_bytes[fidelity] * more), **asked)


def grads_equal(model, twin):
    return all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def checked_steps(model, twin, x, rows):
    """The larger peak of two steps of so many rows, which have plain PyTorch's bits; and plain PyTorch's peak."""
    part, labels = x[:rows].clone(), LABELS[:rows].clone()
    peaks, plain = (
        max(peaks_of_steps(m, lambda m=m: held_step(m, F.cross_entropy, part, labels), part, labels))
        for m in (twin, model)
    )
    assert grads_equal(model, twin)
    return peaks, plain


@pytest.mark.parametrize("way", [torch.sin, F.relu], ids=["an op of PyTorch's", "one of gistkit's"])
@pytest.mark.parametrize("after", [0, 6])
def test_a_single_row_is_told_in_every_order(way, after):
    model, x, plan = Alone(way, after), torch.randn(ROWS, 3, 16, 16), least()
    found = set()
    for order in ((8, 1, 8), (1, 8, 1), (3, 1, 8, 3)):
        twin = gistkit.compress(copy.deepcopy(model), plan)
        peaks = [(rows, *checked_steps(model, twin, x, rows)) for rows in order]
        assert max(peak for _, peak, _ in peaks) <= plan.budget_bytes
        found.add((gistkit.report(twin).notes, *sorted({p for p in peaks if p[0] != 3})))
    ((notes, (_, peak, plain), _),) = found  # of every order the same
    assert peak == plain and len(notes) == 1
    assert notes[0].startswith("a forward of 1 row goes another way than the plan, as plain PyTorch, for which the bud")


@pytest.mark.parametrize("order", [(8, 1), (1, 8), (3, 1)])
def test_what_may_exceed_the_budget_is_a_warning_once(order):
    model, x = Alone(many, 3), torch.randn(ROWS, 3, 16, 16)
    twin = gistkit.compress(copy.deepcopy(model), least())
    told = r"may be exceeded by up to about \d+: a forward of 1 row goes another way .* may have none: expected call 6"
    with pytest.warns(BudgetWarning, match=told) as warned:
        peaks = {rows: checked_steps(model, twin, x, rows)[0] for rows in order}
    over_bytes = int(str(warned[0].message).split("about ")[1].split(":")[0])
    assert len(warned) == 1
    over_now = peaks[1] - gistkit.report(twin).budget.budget_bytes
    assert 0 < over_now <= over_bytes <= 1.01 * over_now
    for rows in order:
        checked_steps(model, twin, x, rows)  # no warning, which would be an error


def without_decisions(model, more="200%"):
    """A plan that keeps all as it is."""
    plan = gistkit.plan(model, torch.zeros(ROWS, 3, 16, 16), LABELS[:ROWS], loss_fn=F.cross_entropy, budget=more)
    assert all(d.codec == "dense" and d.place == "device" for d in plan.decisions)
    return plan


@pytest.mark.parametrize("way", [torch.sin, F.relu], ids=["an op of PyTorch's", "one of gistkit's"])
@pytest.mark.parametrize("order", [(8, 1), (1, 8), (3, 1)])
def test_a_plan_without_decisions_tells_another_way_that_fits(order, way):
    model, x = Alone(way), torch.randn(ROWS, 3, 16, 16)
    plan = without_decisions(model)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    for rows in (*order, *order):
        peak, plain = checked_steps(model, twin, x, rows)
        assert peak <= plan.peak_bytes and (rows != 1 or peak == plain)
    (note,) = gistkit.report(twin).notes
    assert note.startswith("a forward of 1 row goes another way than the plan, as plain PyTorch")
    assert "for which the budget has room: " in note


@pytest.mark.parametrize("order", [(8, 1), (1, 8), (3, 1)])
def test_a_plan_without_decisions_warns_of_another_way_that_may_not_fit(order):
    model, x = Alone(functools.partial(many, maps=400), 0), torch.randn(ROWS, 3, 16, 16)
    plan = without_decisions(model, "100%")
    twin = gistkit.compress(copy.deepcopy(model), plan)
    with pytest.warns(BudgetWarning, match=r"may be exceeded by up to about \d+: a forward of 1 row goes") as warned:
        peaks = {rows: checked_steps(model, twin, x, rows)[0] for rows in order}
    over_bytes = int(str(warned[0].message).split("about ")[1].split(":")[0])
    assert len(warned) == 1 and len(gistkit.report(twin).notes) == 1
    assert 0 < peaks[1] - plan.budget_bytes <= over_bytes <= 1.01 * (peaks[1] - plan.budget_bytes)
    assert all(peak <= plan.peak_bytes for rows, peak in peaks.items() if rows != 1)


@pytest.mark.parametrize("order", [(8, 1), (1, 8), (3, 1)])
def test_another_model_is_refused_in_every_order(order):
    twin, x = Alone(torch.sin), torch.randn(ROWS, 3, 16, 16)
    twin.convs[4] = nn.Sequential(twin.convs[4], nn.SiLU())
    gistkit.compress(twin, least())
    for rows in order:
        with pytest.raises(PlanMismatchError, match="expected call 10 to be conv2d of 'convs"):
            held_step(twin, F.cross_entropy, x[:rows], LABELS[:rows])
    assert not gistkit.report(twin).notes


@pytest.mark.parametrize("before", [(), (8,), (3,)])
def test_a_few_rows_of_another_model_are_no_way_of_this_one(before):
    twin, x = Alone(torch.sin), torch.randn(ROWS, 3, 16, 16)
    gistkit.compress(twin, least())
    for rows in before:
        held_step(twin, F.cross_entropy, x[:rows], LABELS[:rows])
    twin.way, twin.after = torch.cos, 6
    type(twin).silu = torch.sin
    try:
        for rows in (1, 2):
            with pytest.raises(PlanMismatchError, match="to be silu"):
                held_step(twin, F.cross_entropy, x[:rows], LABELS[:rows])
    finally:
        type(twin).silu = F.silu


def test_what_has_one_row_in_any_batch_stays():
    model, x, scale = Alone(torch.sin), torch.randn(ROWS, 3, 16, 16), torch.rand(1, 8)
    plan = least(scaled=True)
    for order in ((8, 1), (1, 8)):
        twin = gistkit.compress(copy.deepcopy(model), plan)
        for rows in order:
            held_step(twin, F.cross_entropy, (x[:rows], scale), LABELS[:rows])
        assert len(gistkit.report(twin).notes) == 1


class Edges(nn.Module):
    """Three edges a row; a single row goes another way."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.row, self.edge = nn.Linear(16, 16), nn.Linear(8, 16)
        self.mid, self.head = nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x, edges):
        x = torch.sin(x) if len(x) == 1 else x
        of_edges = F.silu(self.edge(edges)).view(len(x), len(edges) // len(x), 16).sum(1)
        return self.head(F.silu(self.mid(F.silu(self.row(x)) + of_edges)))


@pytest.mark.parametrize("budget", ["least", "100%"])
def test_what_has_several_entries_a_row_grows_with_it(budget):
    model, (x, edges) = Edges(), (torch.randn(ROWS, 16), torch.randn(3 * ROWS, 8))
    asked = {"loss_fn": F.cross_entropy, "density": 1.0}
    if budget == "least":
        with pytest.raises(gistkit.BudgetError) as refused:
            gistkit.plan(model, (x, edges), LABELS[:ROWS], budget=1, **asked)
        budget = refused.value.least_bytes["bitwise"]
    plan, found = gistkit.plan(model, (x, edges), LABELS[:ROWS], budget=budget, **asked), set()
    for order in ((8, 1), (1, 8), (3, 1)):
        twin = gistkit.compress(copy.deepcopy(model), plan)
        for rows in order:
            for m in (model, twin):
                m.zero_grad()
                held_step(m, F.cross_entropy, (x[:rows], edges[: 3 * rows]), LABELS[:rows])
            assert grads_equal(model, twin)
        found.add(gistkit.report(twin).notes)
    ((note,),) = found
    assert note.startswith("a forward of 1 row goes another way")


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("way", [None, torch.sin], ids=["the way", "another way"])
def test_what_differs_for_the_planned_rows_too_is_what_is_told(rows, way):
    model, x = Alone(way or (lambda x: x), 0), torch.randn(rows, 3, 16, 16)
    twin = gistkit.compress(model, least())
    with (
        pytest.raises(PlanMismatchError, match=r"got call 0 to be conv2d .*bfloat16.*plan it under autocast"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        twin(x)
    with pytest.raises(PlanMismatchError, match=r"inputs that need gradients: \[True\].*or detach them"):
        twin(x.clone().requires_grad_())
    with pytest.raises(PlanMismatchError, match=r"Input type \(double\)"):
        twin(x.double())
    assert not gistkit.report(twin).notes


def test_many_shapes_of_a_few_rows_are_one_note():
    model, x = Alone(torch.sin), torch.randn(ROWS, 3, 16, 16)
    twin = gistkit.compress(copy.deepcopy(model), least())
    for width in range(4, 17):
        checked = x[:1, :, :, :width].clone()
        model.zero_grad()
        held_step(model, F.cross_entropy, checked, LABELS[:1])
        twin.zero_grad()
        held_step(twin, F.cross_entropy, checked, LABELS[:1])
        assert grads_equal(model, twin)
    (note,) = gistkit.report(twin).notes
    assert note.startswith("a forward of 1 row goes another way") and note.endswith("of shape (1, 8, 16, 4)")


def in_parts():
    """A plan in parts of two rows."""
    plans = (least("reassociated", more=more) for more in (1.0, 1.05, 1.1, 1.2))
    return next(p for p in plans if p.sub_batches == 4)


@pytest.mark.parametrize("order", [(8, 6, 5, 4, 3, 2, 7), (5, 6, 7, 8), (3, 2, 4)])
def test_parts_go_the_planned_way_or_are_refused(order):
    model, x = Alone(torch.sin), torch.randn(12, 3, 16, 16)
    plan = in_parts()
    twin = gistkit.compress(copy.deepcopy(model), plan)
    for batch in order:
        given, labels = x[:batch].clone(), LABELS[:batch].clone()
        step = lambda m, g=given, t=labels, **words: gistkit.step(m, F.cross_entropy, g, t, **words)  # noqa: E731
        if batch % 2:
            with pytest.raises(PlanMismatchError, match=f"got call 12 to be sin .* in a part of 1 row of {batch}; "):
                step(twin)
            continue
        peaks = peaks_of_steps(twin, lambda s=step: s(twin), given, labels)
        model.zero_grad()
        step(model, sub_batches=-(-batch // 2), verify=False)
        assert max(peaks) <= plan.budget_bytes and grads_equal(model, twin)
    assert not gistkit.report(twin).notes


@pytest.mark.parametrize("order", [(8, 5, 1), (1, 5, 8), (5, 8)])
def test_parts_that_are_taken_for_what_they_give_are_told(order):
    model, x = Alone(torch.sin), torch.randn(12, 3, 16, 16)
    plan = in_parts()
    twin = gistkit.compress(copy.deepcopy(model), plan)
    with pytest.warns(BudgetWarning, match="a forward of 1 row goes another way") as warned:
        for batch in order:
            given, labels = x[:batch].clone(), LABELS[:batch].clone()
            step = lambda m, g=given, t=labels, **words: gistkit.step(m, F.cross_entropy, g, t, verify=False, **words)  # noqa: E731
            peaks = peaks_of_steps(twin, lambda s=step: s(twin), given, labels)
            model.zero_grad()
            step(model, sub_batches=-(-batch // 2))
            over_bytes = 0 if batch == 8 else int(str(warned[0].message).split("about ")[1].split(":")[0])
            assert max(peaks) <= plan.budget_bytes + over_bytes and grads_equal(model, twin)
    assert len(warned) == 1


def test_parts_have_as_many_rows_as_they_can(monkeypatch):
    monkeypatch.setattr(sys.modules["gistkit.runtime.step.step"], "_plan_of", lambda plan: plan)
    for planned, parts in itertools.product(range(1, 17), range(2, 9)):
        most, least_rows = -(-planned // parts), max(1, planned // parts)
        for batch in range(1, 3 * planned):
            if batch == planned or parts > planned:
                continue
            plan = Plan("by hand", "", (), (), sub_batches=parts, contract=Contract(planned))
            taken = _parts(plan, batch, None)
            possible = [n for n in range(1, batch + 1) if -(-batch // n) <= most]
            assert taken in possible
            assert batch // taken == max(batch // n for n in possible)
            assert batch // taken >= least_rows or not any(batch // n >= least_rows for n in possible)
