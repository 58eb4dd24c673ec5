"""Branches that lead nowhere save what no backward reads: a budget counts it as it is, and no decision is for it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.api.planning import plan_graph
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.runtime.live import LiveBytes
from tests.support.nn_cases import same_bits
from tests.support.peaks import held_step, least_bytes
from tests.support.predicted import steady_peak_bytes


class Dead(nn.Module):
    """Convolutions and ReLUs, a pool, and beside them what leads nowhere, alive until the forward ends."""

    def __init__(self, branch):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.dead, self.head, self.branch = nn.Conv2d(16, 4, 1), nn.Linear(16, 5), branch

    def forward(self, x):
        y = F.relu(self.a(x))
        z = F.avg_pool2d(y, 2)
        held = {
            "both": lambda: (torch.sigmoid(y) * y, self.dead(y)),
            "nothing": lambda: None,
        }[self.branch]()
        z = F.relu(self.b(z))
        out = self.head(z.mean((2, 3)))
        del held
        return out


class Unread(Dead):
    """A result of the model's that the loss does not read, let go of when that is done; its branch is the deepest."""

    def __init__(self):
        super().__init__("nothing")
        self.wide, self.norm, self.narrow = nn.Conv2d(16, 48, 1), nn.BatchNorm2d(48), nn.Conv2d(48, 8, 1)

    def forward(self, x):
        y = F.relu(self.a(x))
        aside = F.max_pool2d(F.relu(self.narrow(F.relu(self.norm(self.wide(y))))), 2)
        z = F.relu(self.b(F.avg_pool2d(y, 2)))
        return self.head(z.mean((2, 3))), aside


def first_of(out, y):
    return F.cross_entropy(out[0] if isinstance(out, tuple) else out, y)


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 3, 16, 16, generator=generator), torch.arange(4)


def step(model, x, y):
    model.zero_grad()
    with LiveBytes(timeline=False) as live:
        live.track(model, x, y)
        loss = held_step(model, first_of, x, y)
    return [loss, *(p.grad for p in model.parameters() if p.grad is not None)], live.peak_bytes


def test_what_a_dead_branch_saves_is_kept_as_it_is():
    torch.manual_seed(0)
    model, (x, y) = Dead("both"), batch()
    plain, plain_peak = step(copy.deepcopy(model), x, y)
    least = least_bytes(model, x, y, loss_fn=F.cross_entropy)
    assert least <= plain_peak
    for budget in (least, (least + plain_peak) // 2):
        twin = gistkit.compress(copy.deepcopy(model), gistkit.plan(model, x, y, loss_fn=F.cross_entropy, budget=budget))
        for _ in range(2):
            ours, peak = step(twin, x, y)
            assert peak <= budget
            assert all(same_bits(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize(
    ("policy", "budget", "lossy"),
    [("plain", None, None), ("optimal", "least", None), ("gist", None, None), ("gist", None, "fp8")],
)
def test_a_result_that_the_loss_does_not_read_is_there_until_the_loss_is_done(policy, budget, lossy):
    """As what stands for it: nodes that lead nowhere hold payloads, masks and maps like any others."""
    torch.manual_seed(0)
    model, (x, y) = Unread(), batch()
    graph = gistkit.capture(model, (x,), backward=True, loss_fn=first_of, targets=(y,))
    recorded = gistkit.capture(model, (x,), fake=False)
    costs = cost_table(graph, hardware("cpu"), density={s.id: s.density for s in recorded.storages if s.density})
    if budget == "least":
        with pytest.raises(gistkit.BudgetError) as refused:
            plan_graph(graph, costs, policy=policy, budget=1)
        budget = refused.value.least_bytes["bitwise"]
    plan = plan_graph(graph, costs, policy=policy, budget=budget, lossy=lossy)
    twin = copy.deepcopy(model) if policy == "plain" else gistkit.compress(copy.deepcopy(model), plan)
    first, second = (step(twin, x, y)[1] for _ in range(2))
    if budget is None:  # gist's first step tries rebuilds, beside what they are compared with
        assert second == steady_peak_bytes(graph, plan, costs)
    else:  # a segment from which nothing is needed never runs anew; its storages' checks are counted
        assert max(first, second) <= plan.peak_bytes <= plan.budget_bytes and second >= 0.99 * plan.peak_bytes
