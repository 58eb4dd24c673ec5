"""Networks and plans for the tests of segments that run anew in backward."""

import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.ir.plan import Decision, Plan
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.forms.allowed import kept_by_ops, own_decisions
from gistkit.planning.forms.predicted import make_plan
from gistkit.planning.policies.checkpoint import checkpoint
from tests.support.graphs import Unsaved
from tests.support.peaks import held_step, peaks_of_steps


def by_pixel(out, t):
    return F.cross_entropy(out, (t % 4)[:, None, None].expand(-1, *out.shape[2:]))


def block(inside, out, dropout=0.0):
    parts = [nn.Conv2d(inside, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts, *([nn.Dropout(dropout)] if dropout else []))


class Unseen(Unsaved):
    """As one whose forward is a kernel of its own: no function mode sees what it does."""

    @staticmethod
    def forward(ctx, x):
        with torch._C.DisableTorchFunction():
            return x * 2


class Hidden(nn.Module):
    def forward(self, x):
        return Unseen.apply(x)


class Chain(nn.Module):
    """Blocks in a row, a classifier behind them."""

    def __init__(self, *blocks, width=8, size=8):
        super().__init__()
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width * size * size, 10)

    def forward(self, x):
        return self.head(self.blocks(x).flatten(1))


def chain(depth=6, dropout=0.0):
    torch.manual_seed(0)
    return Chain(block(3, 8, dropout), *(block(8, 8, dropout) for _ in range(depth - 1)))


def captured(model, x, t, loss_fn=F.cross_entropy):
    graph = gistkit.capture(model, (x,), backward=True, loss_fn=loss_fn, targets=(t,))
    return graph, cost_table(graph, hardware("cpu"))


def planned(model, x, t):
    graph, costs = captured(model, x, t)
    return checkpoint(graph, costs, segments=3)


def by_hand(graph, costs, storages, sources):
    again = [Decision(s, "recompute", "nowhere", sources=tuple(sources)) for s in storages]
    return make_plan("by hand", graph, costs, None, (*own_decisions(graph), *again))


def between(graph):
    """A plan, without figures, in which all that is kept between the first ReLU's output and the third's comes back."""
    relus = [graph.values[c.results[0]].storage for c in graph.calls if c.op == "relu"]
    own = {d.storage for d in own_decisions(graph)} | kept_by_ops(graph)
    found = [s.id for s in graph.kept() if relus[0] < s.id < relus[2] and s.kind == "activation" and s.id not in own]
    again = [Decision(s, "recompute", "nowhere", sources=(relus[0],)) for s in found]
    return Plan("by hand", graph.fingerprint, tuple(again), ())


def measured(model, x, t, loss_fn=F.cross_entropy):
    """Peak of live bytes over a step, all that was there before counted."""
    return peaks_of_steps(model, lambda: held_step(model, loss_fn, x, t), x, t)[1]
