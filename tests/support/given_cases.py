"""Plans that a caller gives, in every form, and steps under them, for the tests of their short way."""

import copy
from collections import Counter
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.ir.plan import Decision, Plan
from gistkit.planning.forms.allowed import kept_by_ops, own_decisions
from gistkit.runtime.live import LiveBytes
from tests.support.call_cases import Net, image
from tests.support.nn_cases import same_bits

LABELS = torch.arange(4) % 5


def network(make=Net):
    torch.manual_seed(0)
    return make()


def planned(make=Net, **words):
    return gistkit.plan(network(make), image(), LABELS, loss_fn=F.cross_entropy, **words)


def tight(**words):
    """A plan and no byte more."""
    return planned(budget=planned(**words).peak_bytes, **words)


def by_hand(make=Net, **forms):
    """All that some ops make is kept in these forms."""
    graph = gistkit.capture(network(make), (image(),), on_cpu=True)
    own = {d.storage for d in own_decisions(graph)} | kept_by_ops(graph)
    source = next(s.id for s in graph.storages if s.kind == "input")
    made = {op: {graph.values[c.results[0]].storage for c in graph.calls if c.op == op} for op in forms}
    found: dict[int, Decision] = {}
    for op, (codec, place) in forms.items():
        for s in graph.kept():
            if s.id in made[op] and s.id not in own and not s.escapes:
                found[s.id] = Decision(s.id, codec, place, sources=(source,) if codec == "recompute" else ())
    return Plan("by hand", graph.fingerprint, (*own_decisions(graph), *found.values()), ())


ANEW = ("recompute", "nowhere")
PLANS = {
    "open": lambda: by_hand(),
    "zeros left out": lambda: by_hand(relu=("zvc", "device")),
    "on the host": lambda: by_hand(relu=("dense", "host"), conv2d=("dense", "host")),
    "outputs anew": lambda: by_hand(conv2d=ANEW),
    "all anew": lambda: by_hand(conv2d=ANEW, relu=ANEW),
    "gist": lambda: planned(policy="gist"),
    "gist, tight": lambda: tight(policy="gist", density=0.1),
    "90 %": lambda: planned(budget="90%", hardware="cpu"),
    "75 %": lambda: planned(budget="75%", hardware="cpu"),
    "lossy": lambda: planned(policy="gist", lossy="fp16"),
}


@cache
def made(name):
    return PLANS[name]()


def pair(plan, make=Net):
    """Two models under a plan, or that of a name."""
    plan, model = made(plan) if isinstance(plan, str) else plan, network(make)
    return [gistkit.compress(copy.deepcopy(model), plan) for _ in range(2)]


def held_off(model):
    """Have the model's next forward go the long way."""
    for program in model.forward.engine._programs.values():
        program.calls[:] = [None] * len(program.steps)


def step(model, x):
    """Loss, gradients and buffers of a step that moves the parameters; its peak of live bytes and its report."""
    model.zero_grad(set_to_none=True)
    with LiveBytes(timeline=False) as live:
        live.track(model, x)
        loss = F.cross_entropy(model(x), LABELS[: len(x)])
        loss.backward()
    stats = model.forward.engine.stats
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.01)
    bits = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]
    return bits, live.peak_bytes, stats.kept_bytes, Counter(stats.rows)


def agree(short, long, x):
    """A step of both, the second the long way, must be the same."""
    held_off(long)
    (ours, *said), (theirs, *known) = step(short, x), step(long, x)
    assert len(ours) == len(theirs) and all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
    assert said == known


class Mixed(nn.Module):
    """Batch norms with and without a counter, modules beside functions and methods, a layer that runs twice."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(5))
        self.norms[1].momentum, self.norms[2] = None, nn.BatchNorm2d(8, track_running_stats=False)
        self.relu, self.other, self.head = nn.ReLU(), nn.ReLU(inplace=True), nn.Linear(8, 5)

    def forward(self, x):
        x = self.relu(self.norms[0](self.convs[0](x)))
        y = torch.relu(self.norms[1](self.convs[1](x)))
        y = F.batch_norm(self.convs[2](y), None, None, training=True)
        x = self.other(y + x)
        y = F.relu(self.norms[3](F.conv2d(x, self.convs[3].weight, padding=1))) * 0.5
        x = self.other(self.norms[2](self.convs[4](y)).add_(x))
        x = self.relu(self.norms[4](self.convs[4](x)).relu())
        return self.head(x.mean((2, 3)))
