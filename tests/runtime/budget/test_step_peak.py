"""A step that takes more of a card than its plan counts does not do so unnoticed."""

import copy

import pytest
import torch
import torch.nn.functional as F

import gistkit
from gistkit.runtime.program import step_peak
from tests.runtime.budget.test_denser import ROWS, compressed, rows, step
from tests.support.step_cases import block

MIB = 2**20


@pytest.fixture
def card(monkeypatch):
    """A card whose allocator says what the test wants: bytes before a step, and its peak."""
    said = {"before": 0, "highest": 0}
    monkeypatch.setattr(step_peak, "CUDA_LIBRARIES_BYTES", 1000)
    monkeypatch.setattr(step_peak, "_card", lambda given: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: said["before"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: said["highest"])
    return said


def planned():
    torch.manual_seed(0)
    model, x, t = block(), torch.randn(4, 3, 32, 32), torch.randint(10, (4,))
    plan = gistkit.plan(model, x, t, loss_fn=F.cross_entropy, budget="80%")
    there = sum(p.untyped_storage().nbytes() for p in (*model.parameters(), *model.buffers(), x))
    return gistkit.compress(copy.deepcopy(model), plan), x, t, plan, there


def steps(model, x, t, card, peaks):
    """A step for each peak that the card will tell of at its end; those before took nothing."""
    for peak in peaks:
        card["highest"] = card["before"]
        loss = F.cross_entropy(model(x), t)
        card["highest"] = peak
        loss.backward()


def test_a_peak_above_the_budget_is_told_once_with_the_excess(card):
    model, x, t, plan, there = planned()
    card["before"] = there + 50 * MIB  # the last are another model's
    most = card["before"] + plan.budget_bytes - there - 1000
    steps(model, x, t, card, [most + MIB, most])  # the libraries take theirs in the first step
    with pytest.warns(gistkit.BudgetWarning, match=rf"is exceeded by {MIB}: .* {most + MIB - card['before']} bytes be"):
        steps(model, x, t, card, [most + MIB])
    steps(model, x, t, card, [most + MIB])


def test_a_peak_of_payloads_denser_than_planned_is_told_as_such(card):
    model, _ = compressed(0.25, room=100)
    x = rows(*[0.25] * ROWS), rows(*[0.5] * ROWS)
    step(model, x[0])
    with pytest.warns(gistkit.BudgetWarning) as told:
        card["highest"], made = 0, model(x[1])
        card["highest"] = 2**32
        made.sum().backward()
    assert ["may be exceeded" in str(w.message) for w in told] == [True]


def test_a_peak_that_an_earlier_step_reached_tells_nothing_of_this_one(card):
    model, x, t, plan, _ = planned()
    for _ in range(4):
        card["highest"] = 2 * plan.budget_bytes
        F.cross_entropy(model(x), t).backward()
