"""Forwards of fewer rows than planned, under a budget: an epoch's last batch, uneven sub-batches. What PyTorch's own
ops save is known by its shape, so these are captured for themselves."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gistkit
from gistkit.runtime.program import match_plan as given
from gistkit.runtime.program import sizes
from tests.support.peaks import held_step, peaks_of_steps

ROWS = 8
LABELS = torch.arange(ROWS) % 5


class Net(nn.Module):
    """Convolutions with SiLUs, which gistkit has no operators for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        convs = [nn.Conv2d(8 if i else 3, 8, 3, padding=1) for i in range(6)]
        self.body = nn.Sequential(*(m for conv in convs for m in (conv, nn.SiLU())))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


@pytest.fixture
def captures(monkeypatch):
    """The number of rows of every forward that a given plan was compiled for."""
    seen = []
    compiled = sizes.given_program

    def given_program(plan, model, args, kwargs):
        seen.append(len(args[0]))
        return compiled(plan, model, args, kwargs)

    monkeypatch.setattr(sizes, "given_program", given_program)
    return seen


def least(model, x, **asked):
    """The plan of the least budget."""
    asked = {"loss_fn": F.cross_entropy, "density": 1.0, **asked}
    with pytest.raises(gistkit.BudgetError) as refused:
        gistkit.plan(model, x, LABELS[: len(x)], budget=1, **asked)
    budget = refused.value.least_bytes[asked.get("fidelity", "bitwise")]
    return gistkit.plan(model, x, LABELS[: len(x)], budget=budget, **asked)


def test_fewer_rows_take_less(captures):
    model, x = Net(), torch.randn(ROWS, 3, 16, 16)
    plan = least(model, x)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    for rows in (8, 7, 3, 7, 8):
        part, labels = x[:rows].clone(), LABELS[:rows].clone()
        peaks = peaks_of_steps(twin, lambda p=part, t=labels: held_step(twin, F.cross_entropy, p, t), part, labels)
        model.zero_grad()
        held_step(model, F.cross_entropy, part, labels)
        # parameters and their gradients are less than a seventh of the plan's peak; all else is in proportion
        assert max(peaks) <= plan.peak_bytes * (rows / ROWS + 1 / 7)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert captures == [8, 7, 3]


def test_uneven_parts_keep_a_budget(captures):
    model, x, y = Net(), torch.randn(7, 3, 16, 16), LABELS[:7]
    asked = {"loss_fn": F.cross_entropy, "fidelity": "reassociated", "density": 1.0}
    lowest = least(model, x, fidelity="reassociated").peak_bytes
    plans = (gistkit.plan(model, x, y, budget=int(lowest * more), **asked) for more in (1.1, 1.2, 1.35, 1.5))
    plan = next(p for p in plans if 1 < p.sub_batches < 7)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    peaks = peaks_of_steps(twin, lambda: gistkit.step(twin, F.cross_entropy, x, y, verify=False), x, y)
    assert max(peaks) <= plan.peak_bytes
    # a smaller part comes first, then a larger one; its program stays that of its size
    assert captures == [7 // plan.sub_batches, -(-7 // plan.sub_batches)]


def test_a_size_keeps_its_program_when_a_larger_one_comes(captures):
    model, x = Net(), torch.randn(ROWS, 3, 16, 16)
    twin = gistkit.compress(copy.deepcopy(model), least(model, x))
    for rows in (3, 5, 3, 8, 5, 3, 8):
        part, labels = x[:rows].clone(), LABELS[:rows].clone()
        peaks = peaks_of_steps(twin, lambda p=part, t=labels: held_step(twin, F.cross_entropy, p, t), part, labels)
        model.zero_grad()
        held_step(model, F.cross_entropy, part, labels)
        assert max(peaks) <= gistkit.report(twin).budget.budget_bytes * (rows / ROWS + 1 / 7)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert captures == [3, 5, 8]


def test_sizes_beyond_the_held_ones_are_captured_again(captures, monkeypatch):
    monkeypatch.setattr(sizes, "MOST", 2)
    model, x = Net(), torch.randn(ROWS, 3, 16, 16)
    twin = gistkit.compress(model, least(model, x))
    known = twin.__dict__["forward"].engine._sizes._known
    for rows in (8, 7, 8, 6, 7, 6, 8):
        held_step(twin, F.cross_entropy, x[:rows], LABELS[:rows])
        assert len(known) <= 2
    assert captures == [8, 7, 6, 7, 8]


@pytest.mark.parametrize("decided", [True, False])
def test_sizes_up_to_the_held_ones_are_captured_once(captures, decided):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 5)), torch.randn(sizes.MOST, 4)
    y = torch.arange(sizes.MOST) % 5
    plan = gistkit.plan(model, x, y, loss_fn=F.cross_entropy, budget="100%")
    if decided:
        with pytest.raises(gistkit.BudgetError) as refused:
            gistkit.plan(model, x, y, loss_fn=F.cross_entropy, budget=1, density=1.0)
        budget = refused.value.least_bytes["bitwise"]
        plan = gistkit.plan(model, x, y, loss_fn=F.cross_entropy, budget=budget, density=1.0)
    twin = gistkit.compress(model, plan)
    for _ in range(2):
        for rows in range(sizes.MOST, 0, -1):
            held_step(twin, F.cross_entropy, x[:rows], y[:rows])
    assert captures == list(range(sizes.MOST, 0, -1))


class Again(nn.Module):
    """A checkpoint right at the input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x):
        first = checkpoint(lambda x: F.silu(self.first(x)), x, use_reentrant=False)
        return self.second(F.relu(first))


@pytest.mark.parametrize("check", [True, False])
def test_a_part_that_a_checkpoint_keeps_is_no_larger_than_itself(check):
    model, x, y = Again(), torch.randn(64, 16), torch.arange(64) % 5
    asked = {"loss_fn": F.cross_entropy, "fidelity": "reassociated", "density": 1.0}
    with pytest.raises(gistkit.BudgetError) as refused:
        gistkit.plan(model, x, y, budget=1, **asked)
    lowest, uneven = refused.value.least_bytes["reassociated"], []
    for more in (1.05, 1.1, 1.15, 1.2, 1.25, 1.3):
        plan = gistkit.plan(model, x, y, budget=int(lowest * more), **asked)
        uneven.append(bool(64 % plan.sub_batches))
        twin = gistkit.compress(copy.deepcopy(model), plan)
        peaks = peaks_of_steps(twin, lambda t=twin: gistkit.step(t, F.cross_entropy, x, y, verify=check), x, y)
        assert max(peaks) <= plan.peak_bytes
        model.zero_grad()
        gistkit.step(model, F.cross_entropy, x, y, sub_batches=plan.sub_batches)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert any(uneven)


def test_inputs_that_share_memory_stay_so(monkeypatch):
    seen = []
    monkeypatch.setattr(given, "capture", lambda model, args, kwargs, on_cpu: seen.append(args) or 1 / 0)
    x, y, pair = torch.randn(6, 4), torch.randn(6, 8), torch.randn(4, 4)
    for args in ((x[2:], y[1:, ::2], pair[:2], pair[2:], x.sum()), (x, y)):
        with pytest.raises(ZeroDivisionError):
            given.given_program(None, nn.Linear(4, 4), args, {})
    (first, second, *others), whole = seen
    assert whole[0] is x and whole[1] is y
    assert others[0].untyped_storage()._cdata == others[1].untyped_storage()._cdata == pair.untyped_storage()._cdata
    for view, of in ((first, x[2:]), (second, y[1:, ::2])):
        assert (view.shape, view.stride(), view.storage_offset()) == (of.shape, of.stride(), 0)
    assert first.untyped_storage().nbytes() == 4 * 4 * 4 and second.untyped_storage().nbytes() == 4 * (4 * 8 + 7)
