"""Whole modules that run anew in backward: bits, bytes, what is refused.

Reference is plain PyTorch, bit for bit; bytes are counted by LiveBytes and are those of the simulator.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.ir import Plan
from gistkit.runtime.recompute import modules
from gistkit.runtime.recompute.calls import ReplayError
from gistkit.runtime.recompute.modules import run_anew
from gistkit.runtime.stash.verify import digest
from tests.support.models import Block, Blocks
from tests.support.peaks import peaks_of_steps, unchecked_peak
from tests.support.training import assert_same, batches


def planned(model, data, budget="60%", amp=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        plan = gistkit.plan(model, *data[0], loss_fn=F.cross_entropy, policy="blocks", budget=budget, hardware="cpu")
    return Plan.from_json(plan.to_json())


def step_of(model, x, y, amp=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        out = model(x)
        loss = F.cross_entropy(out, y)
    loss.backward()


@pytest.mark.parametrize("budget", ["85%", "45%"])
@pytest.mark.parametrize("words", [{}, {"dropout": 0.2}, {"masked": True}])
def test_bits_and_bytes(words, budget):
    torch.manual_seed(0)
    model, data = Blocks(**words), batches(3, 8, 16)
    plan = planned(model, data, budget)
    assert 1 <= len(plan.modules) < 6
    twin = gistkit.compress(copy.deepcopy(model), plan)
    first, second = peaks_of_steps(twin, lambda: step_of(twin, *data[0]), data[0])
    steady = unchecked_peak(plan, model, *data[0], loss_fn=F.cross_entropy)
    assert second == steady <= first <= plan.peak_bytes
    assert_same(model, twin, data, F.cross_entropy)
    assert peaks_of_steps(twin, lambda: step_of(twin, *data[0]), data[0]) == [steady] * 2
    stats = gistkit.report(twin).stats
    assert stats.kept_bytes == plan.kept_bytes
    again = {r.storage: (r.kept_bytes, r.reason) for r in stats.rows if r.codec == "recompute"}
    assert again == {d.storage: (0, d.reason) for d in plan.decisions}
    assert {reason for _, reason in again.values()} == {f"{name} runs anew" for name in plan.modules}
    assert not any("forward" in vars(part) for part in twin.blocks)


def test_under_autocast_casts_of_weights_go_and_come_back():
    torch.manual_seed(0)
    model, data = Blocks(), batches(2, 8, 16)
    plan = planned(model, data, "50%", amp=True)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    (first, _) = peaks_of_steps(twin, lambda: step_of(twin, *data[0], amp=True), data[0])
    assert first <= plan.peak_bytes
    for x, y in data:
        for m in (model, twin):
            m.zero_grad()
            step_of(m, x, y, amp=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    (peak, _) = peaks_of_steps(twin, lambda: step_of(twin, *data[0], amp=True), data[0])
    assert 0.98 * plan.peak_bytes <= peak <= plan.peak_bytes


def test_backward_twice_and_sums_of_gradients():
    torch.manual_seed(0)
    model, data = Blocks(dropout=0.2), batches(1, 8, 16)
    (x, y), twin = data[0], copy.deepcopy(model)
    gistkit.compress(twin, planned(model, data, budget=None))
    for m in (model, twin):
        torch.manual_seed(1)
        loss = F.cross_entropy(m(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_without_gradients_and_in_evaluation_nothing_is_other():
    model, data = Blocks(), batches(1, 8, 16)
    twin = gistkit.compress(copy.deepcopy(model), planned(model, data, budget=None))
    with torch.no_grad():
        assert torch.equal(twin(data[0][0]), model(data[0][0]))
    assert torch.equal(twin.eval()(data[0][0]), model.eval()(data[0][0]))


def test_a_forward_of_somebodys_own_runs_within_and_stays():
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []

    def own(x):
        seen.append(1)
        return F.linear(x, model[1].weight, model[1].bias).sin()

    model[1].forward = own
    with run_anew(model, ["1"], {}):
        out = model(torch.ones(2, 4))
    out.sum().backward()
    assert len(seen) == 2 and vars(model[1])["forward"] is own


def test_a_forward_that_fails_leaves_the_modules_as_they_were():
    class Failing(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    model = nn.Sequential(nn.Linear(4, 4), Failing())
    with pytest.raises(ZeroDivisionError), run_anew(model, ["0", "1"], {}):
        model(torch.ones(2, 4))
    assert not any("forward" in vars(part) for part in model)


class Given(nn.Module):
    def forward(self, x):
        return (x * 2).sin().cos()


def test_what_a_module_was_given_must_stay():
    model = nn.Sequential(Given(), Given())
    x = torch.ones(4, requires_grad=True) * 1
    with run_anew(model, ["0"], {}):
        out = model(x)
    x.mul_(2)
    with pytest.raises(ReplayError, match="what module 0 was given, or a parameter, has changed since its forward"):
        out.sum().backward()


def test_a_parameter_must_stay():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with run_anew(model, ["0"], {}):
        out = model(torch.ones(2, 4))
    with torch.no_grad():
        model[0].bias.mul_(2)  # which PyTorch's own node does not save
    with pytest.raises(ReplayError, match="what module 0 was given, or a parameter, has changed since its forward"):
        out.sum().backward()


class Turning(nn.Module):
    """Its first call, in forward, is of ``first``; the others are of ``then``."""

    def __init__(self, first, then):
        super().__init__()
        self.ways = iter((first, then))

    def forward(self, x):
        return next(self.ways)(x)


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (lambda x: x.sin(), "module 0 saved fewer tensors when it ran anew"),
        (lambda x: x.sin().sum().exp(), "module 0 saved another tensor when it ran anew"),
        (lambda x: x.sin().mul(1 + 2**-23).exp(), "module 0 did not save the same bits when it ran anew"),
    ],
)
def test_a_module_that_goes_another_way_is_refused(then, message):
    model = nn.Sequential(Turning(lambda x: x.sin().exp(), then))
    with run_anew(model, ["0"], {}):
        out = model(torch.ones(4, requires_grad=True))
    with pytest.raises(ReplayError, match=message):
        out.sum().backward()


def test_bits_of_what_was_saved_for_nobody_first_are_compared():
    def two(y):
        y.sin()  # saves y, too, and is gone
        return y.cos()

    model = nn.Sequential(Turning(lambda x: two(x.sin()), lambda x: two(x.sin().mul(1 + 2**-23))))
    with run_anew(model, ["0"], {}):
        out = model(torch.ones(4, requires_grad=True))
    with pytest.raises(ReplayError, match="did not save the same bits"):
        out.sum().backward()


class Saving(nn.Module):
    """It saves what it is given, its weight, a product twice, and a random state that nobody writes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = x * self.weight
        return Stateful.apply(y.exp_() * y)


class Stateful(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.randint(2**62, (2,), generator=NOISE))
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        assert len(ctx.saved_tensors) == 1
        return grad * 2


NOISE = torch.Generator()


def test_bits_are_compared_once_for_each_kind_of_call(monkeypatch):
    digests = []
    monkeypatch.setattr(modules, "digest", lambda x: digests.append(tuple(x.shape)) or digest(x))
    model, known = nn.Sequential(Saving()), {}
    for rows, amp, expected in ((2, False, 2), (2, False, 0), (3, False, 2), (2, True, 2), (3, False, 0)):
        with run_anew(model, ["0"], known), torch.autocast("cpu", torch.bfloat16, enabled=amp):
            out = model(torch.ones(rows, 4, requires_grad=True))
        out.sum().backward()
        assert digests == [(rows, 4)] * expected
        digests.clear()


def test_what_is_behind_the_last_saved_tensor_does_not_run():
    def fails(x):
        raise AssertionError

    model = nn.Sequential(Turning(lambda x: x.sin() + 1, lambda x: fails(x.sin())))
    with run_anew(model, ["0"], {}):
        out = model(torch.ones(4, requires_grad=True))
    out.sum().backward()


def test_backward_within_the_modules_forward_is_refused():
    class Inner(nn.Module):
        def forward(self, x):
            y = x.sin()
            return y * torch.autograd.grad(y.sum(), x)[0]

    model = nn.Sequential(Inner())
    with run_anew(model, ["0"], {}), pytest.raises(ReplayError, match="within its own forward"):
        model(torch.ones(4, requires_grad=True))


class OfAny(Block):
    def forward(self, x):
        return super().forward(x[0] if isinstance(x, list) else x)


class Listed(Blocks):
    kind, listed = OfAny, False

    def run(self, block, x, mask):
        return block([x] if self.listed else x)


def test_a_plan_of_modules_that_are_given_something_else_is_refused():
    model, data = Listed(), batches(1, 8, 16)
    plan = planned(model, data, budget=None)
    model.listed = True
    with pytest.raises(
        gistkit.PlanMismatchError, match=r"expected module 'blocks\.0' to run once, on tensors and plain"
    ):
        gistkit.compress(model, plan)(data[0][0])


def test_a_plan_of_modules_decides_nothing_else():
    model, data = Blocks(), batches(1, 8, 16)
    plan = planned(model, data, budget=None)
    wrong = plan.decisions[0].__class__(plan.decisions[0].storage, "fp8")
    damaged = Plan(**{**vars(plan), "decisions": (wrong, *plan.decisions[1:]), "fidelity": "lossy"})
    with pytest.raises(gistkit.PlanError, match="must be all of codec recompute"):
        gistkit.compress(model, damaged)(data[0][0])
