"""A plan of the policy ``plain`` that is given to compress: PyTorch runs by itself, and holds what was predicted."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.capture.nodes import reachable
from tests.support.peaks import peaks_of

IMAGES = (4, 8, 16, 16)


def conv(kernel=3):
    return nn.Conv2d(8, 8, kernel, padding=kernel // 2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        x = x + self.attend(x, x, x)[0]
        return x + self.narrow(F.dropout(torch.relu(self.wide(self.norm(x))), 0.2))


NETS = {
    "dropouts": (lambda: [conv(), nn.ReLU(), nn.Dropout(0.3), conv(), nn.Dropout(0.2, inplace=True), conv(1)], IMAGES),
    "attention": (lambda: [Attention(), Attention()], (4, 10, 16)),
}


class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x).square().mean()


def made(name):
    torch.manual_seed(0)
    layers, shape = NETS[name]
    return Net(layers()), torch.randn(shape)


@pytest.mark.parametrize(("name", "budget"), [("dropouts", "100%"), ("attention", None)])
def test_the_prediction_is_what_a_step_holds_and_the_nodes_are_pytorchs(name, budget):
    model, x = made(name)
    plan = gistkit.plan(model, x, policy="plain", budget=budget)
    assert peaks_of(model, plan, x) == [plan.peak_bytes] * 2
    twin = gistkit.compress(copy.deepcopy(model), plan)
    results = []
    for net in (model, twin):
        torch.manual_seed(1)
        loss = net(x)
        nodes = {node.name() for node in reachable([loss])}
        loss.backward()
        results.append((loss, nodes, [p.grad for p in net.parameters()]))
    (loss, nodes, grads), (own_loss, own_nodes, own_grads) = results
    assert nodes == own_nodes and torch.equal(loss, own_loss)
    assert all(torch.equal(a, b) for a, b in zip(grads, own_grads, strict=True))


def test_the_report_tells_that_pytorch_keeps_everything():
    model, x = made("dropouts")
    plan = gistkit.plan(model, x, policy="plain", budget="100%")
    gistkit.compress(model, plan)(x).backward()
    found = gistkit.report(model)
    kept = gistkit.capture(made("dropouts")[0], (x,)).kept_bytes
    assert found.stats.kept_bytes == found.stats.plain_bytes == found.stats.predicted_bytes == kept
    assert {r.codec for r in found.stats.rows} == {"dense"} and "PyTorch's own operators run" in str(found)
    assert found.budget.predicted_bytes == found.budget.budget_bytes == plan.peak_bytes


def test_a_forward_that_leaves_the_plan_is_refused():
    class Turning(nn.Module):
        turned = False

        def __init__(self):
            super().__init__()
            self.layer = conv()

        def forward(self, x):
            x = self.layer(x)
            return (x if self.turned else torch.relu(x)).sum()

    model, x = Turning(), torch.randn(IMAGES)
    gistkit.compress(model, gistkit.plan(model, x, policy="plain", budget="100%"))
    model(x).backward()
    model.turned = True
    with pytest.raises(gistkit.PlanMismatchError, match=r"expected 2 covered calls, got 1"):
        model(x)
    with pytest.raises(gistkit.PlanMismatchError, match=r"a forward of at most 4 rows.*one of 5 rows"):
        model(torch.randn(5, *IMAGES[1:]))
