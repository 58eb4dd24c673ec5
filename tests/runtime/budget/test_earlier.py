"""Forwards that run twice before backward, and graphs that are retained, break a budget's promise: it is said."""

import copy
import re
import warnings

import pytest
import torch
import torch.nn.functional as F

import gistkit
from tests.support.step_cases import block, run


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(0)
    return torch.randn(4, 3, 32, 32), torch.randint(10, (4,))


@pytest.fixture(scope="module", params=["optimal", "plain"])
def made(request, data):
    """A network with a plan whose budget leaves next to nothing."""
    torch.manual_seed(0)
    model = block()
    budget = "100%" if request.param == "plain" else "80%"
    plan = gistkit.plan(model, *data, loss_fn=F.cross_entropy, budget=budget, policy=request.param)
    kept = sum(s.nbytes for s in gistkit.capture(model, data[:1]).kept() if s.kind == "activation")
    return model, plan, kept


@pytest.fixture
def model(made):
    return gistkit.compress(copy.deepcopy(made[0]), made[1])


def warned(model, data, step):
    """The only warning of two steps, its figures (the budget, the excess, what is held), the first one's peak."""
    with warnings.catch_warnings(record=True) as caught, gistkit.LiveBytes() as live:
        warnings.simplefilter("always")
        live.track(model, *data)
        step()
        peak = live.peak_bytes
        step()
    (warning,) = [w for w in caught if issubclass(w.category, gistkit.BudgetWarning)]
    text = str(warning.message)
    return text, [int(n) for n in re.findall(r"(\d+) bytes|up to (\d+)", text) for n in n if n], peak


def test_two_forwards_before_a_backward_are_told_once(model, made, data):
    plan, stats = made[1], []

    def step():
        x, t = data
        first = F.cross_entropy(model(x), t)
        stats.append(gistkit.report(model).stats)
        (first + F.cross_entropy(model(x + 1), t)).backward()

    text, (budget, excess, held), peak = warned(model, data, step)
    assert budget == plan.budget_bytes and excess == held - (plan.budget_bytes - plan.peak_bytes)
    assert held == sum(row.kept_bytes for row in stats[0].rows if row.shape != tuple(data[0].shape))
    # beside what is held: the second input, the first logits and the first loss with what its backward reads
    beside = data[0].nbytes + 5 * data[0].shape[0] * 10 * 4
    assert budget < peak <= budget + excess + beside
    assert "while" in text and "an earlier forward of this model kept for a backward that has not run" in text
    assert text.endswith("or plan with so many bytes more as reserved_bytes=")


def test_a_retained_graph_is_told(model, made, data):
    plan = made[1]

    def step():
        loss = run(model, data, retain_graph=True)
        loss.backward()

    text, (budget, excess, _), peak = warned(model, data, step)
    assert budget == plan.budget_bytes and peak <= budget + excess
    assert "a graph is retained" in text and "call backward once, without retain_graph" in text


def test_with_the_bytes_as_reserve_nothing_is_told(made, data):
    (model, plan, kept), (x, t) = made, data
    model = copy.deepcopy(model)
    room = {"budget": plan.budget_bytes + kept, "reserved_bytes": kept, "policy": plan.policy}
    gistkit.compress(model, gistkit.plan(model, x, t, loss_fn=F.cross_entropy, **room))
    (F.cross_entropy(model(x), t) + F.cross_entropy(model(x), t)).backward()


def _loop(model, x, t):
    for _ in range(3):
        out = model(x)
        loss = F.cross_entropy(out, t)
        loss.backward()
    return out, loss


def _kept_results(model, x, t):
    """Results that live on, of which backward has run."""
    kept = []
    for _ in range(3):
        kept.append(model(x))
        F.cross_entropy(kept[-1], t).backward()


def _dropped(model, x, t):
    for _ in range(3):
        out = model(x)
        del out


def _evaluated(model, x, t):
    with torch.no_grad():
        model.eval()(x)
        model(x)
    model.train()
    _loop(model, x, t)


def _parts(model, x, t):
    gistkit.step(model, F.cross_entropy, x, t, sub_batches=4)
    gistkit.step(model, F.cross_entropy, x, t)


def _failed(model, x, t):
    with pytest.raises(ValueError):
        F.cross_entropy(model(x), t[:1])
    _loop(model, x, t)


def _halves(model, x, t):
    """Two forwards of half the rows hold no more than one of all."""
    _loop(model, x, t)
    (F.cross_entropy(model(x[:2]), t[:2]) + F.cross_entropy(model(x[2:]), t[2:])).backward()


LOOPS = [_loop, _kept_results, _dropped, _evaluated, _parts, _failed, _halves]


def test_steps_within_the_budget_tell_nothing(made, data):
    for loop in LOOPS:
        loop(gistkit.compress(copy.deepcopy(made[0]), made[1]), *data)  # warnings are errors
