"""Models, data and plans by hand for the tests of plans that are carried out."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.ir.contract import Contract
from gistkit.ir.plan import Decision, Plan
from gistkit.ir.queries import Reading
from gistkit.planning import task_calls
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.forms.options import options
from gistkit.planning.forms.readers import call_choices
from gistkit.runtime.live import LiveBytes
from tests.support.peaks import held_step

BATCH = 4
# The CPU with a link, so that the host may be planned for it.
LINKED = replace(hardware("cpu"), name="cpu with a link", d2h_gbps=100.0, h2d_gbps=100.0, both_gbps=200.0)


class Small(nn.Module):
    """Every covered op but a residual sum: conv, norm, relu, pool, dropout, linear; an uncovered norm with a pool in
    it; two uncovered activations of one shape."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.pool, self.local, self.drop = nn.MaxPool2d(2), nn.LocalResponseNorm(3), nn.Dropout(0.5)
        self.head = nn.Linear(8 * 7 * 7, 10)

    def forward(self, x):
        x = self.local(self.norm(self.first(x)).relu())
        x = self.pool(self.second(x).relu())
        x = torch.sigmoid(x) + torch.tanh(x)
        return self.head(self.drop(x.flatten(1)).relu())


class Shared(nn.Module):
    """One activation with three readers in backward."""

    def __init__(self):
        super().__init__()
        self.first, self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x):
        x = self.first(x).relu()
        return self.a(x) * self.b(x)


def data(size=16, classes=4):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BATCH, 3, size, size, generator=generator), torch.arange(BATCH) % classes


def captured(model, x, y, on=LINKED, density=0.7):
    graph = gistkit.capture(model, (x,), backward=True, loss_fn=loss_of, targets=(y,))
    return graph, cost_table(graph, on, density=density)


def loss_of(out, y):
    return F.cross_entropy(out if out.dim() == 2 else out.mean((2, 3)), y)


def step(model, x, y, *, seed=1):
    """(loss, gradients, LiveBytes) of one step from no gradients."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        live.track(model, x, y)
        loss = held_step(model, loss_of, x, y)
    return loss, [p.grad for p in model.parameters()], live


def made(graph, decisions, *choices, **fields):
    """A plan with a budget that no step exceeds, so that whatever is not carried out is an error."""
    decisions = tuple(decisions)
    free = {d.storage: d for d in decisions if d.codec == "drop"}
    calls = {c.covered: c for c in (*call_choices(Reading(graph), free), *choices)}
    rounds = any(d.form.rounds_to for d in decisions)
    fields = {
        "budget_bytes": 2**40,
        "contract": Contract(BATCH, **task_calls(graph)),
        "fidelity": ("bitwise", "lossy")[rounds],
        **fields,
    }
    return Plan("by hand", graph.fingerprint, decisions, tuple(calls.values()), **fields)


def same(first, second):
    return torch.equal(first[0], second[0]) and all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


def ways(graph, costs, number, place, lossy=None):
    """One decision a storage: the ``number``-th codec at the place, coming back at its first use; else the first."""
    for found in options(graph, costs, lossy).values():
        late = {}
        for d in found:
            if d.place == place and (d.codec not in late or d.prefetch > late[d.codec].prefetch):
                late[d.codec] = d
        yield list(late.values())[min(number, len(late) - 1)] if late else found[0]


def hosted(graph, op, codec="dense"):
    """The decision that ships the output of the first call of an op."""
    storage = graph.values[next(c for c in graph.calls if c.op == op).results[0]].storage
    return Decision(storage, codec, "host", release=3, prefetch=8)
