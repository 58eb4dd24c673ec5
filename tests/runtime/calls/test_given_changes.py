"""Specialised calls under a given plan, of models that are changed or watched: they do and refuse the same."""

from collections import Counter
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.ir.plan import Decision, Plan
from gistkit.planning.forms.allowed import kept_by_ops, own_decisions
from gistkit.runtime.live import LiveBytes
from tests.support import call_cases
from tests.support.call_cases import Net, image
from tests.support.models import Checkpointed
from tests.support.nn_cases import same_bits

BUDGETS = ["gist, tight", "75 %"]
pytestmark = pytest.mark.filterwarnings("ignore::gistkit.errors.BudgetWarning")

LABELS = torch.arange(4) % 5


def network(make=Net):
    torch.manual_seed(0)
    return make()


def planned(**words):
    return gistkit.plan(network(), image(), LABELS, loss_fn=F.cross_entropy, **words)


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
    "all anew": lambda: by_hand(conv2d=ANEW, relu=ANEW),
    "gist, tight": lambda: tight(policy="gist", density=0.1),
    "75 %": lambda: planned(budget="75%", hardware="cpu"),
}


@cache
def made(name):
    return PLANS[name]()


def held_off(model):
    """Have the model's next forward go the long way."""
    for program in model.forward.engine._programs.values():
        program.calls[:] = [None] * len(program.steps)


def step(model, x):
    """The bits of a step that moves the parameters; its peak of live bytes and its report."""
    with LiveBytes(timeline=False) as live:
        live.track(model, x)
        bits = call_cases.step(model, x)
    stats = model.forward.engine.stats
    return bits, live.peak_bytes, stats.kept_bytes, Counter(stats.rows)


def agree(short, long, x):
    """A step of both, the second the long way, must be the same."""
    held_off(long)
    (ours, *said), (theirs, *known) = step(short, x), step(long, x)
    assert len(ours) == len(theirs) and all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
    assert said == known


def settled(plan, make=Net, steps=3):
    """Two models under a plan, or that of a name, after some steps."""
    plan = made(plan) if isinstance(plan, str) else plan
    models = [gistkit.compress(network(make), plan) for _ in range(2)]
    for seed in range(steps):
        agree(*models, image(seed=seed))
    return models


def in_place_later(model):
    model.relu.inplace = True
    model.convs[1].register_forward_pre_hook(lambda m, args: setattr(model.relu, "inplace", False))


CHANGES = {
    "strided": lambda m: vars(m.convs[2]).update(padding=(2, 2), dilation=(2, 2)),
    "larger": lambda m: m.convs[2].register_forward_pre_hook(lambda _, args: (F.pad(args[0], (1, 1, 1, 1)),)),
    "not in place": lambda m: vars(m.relu).update(inplace=False),
    "in place later": in_place_later,
    "evaluated": lambda m: m.norms[0].eval(),
    "frozen": lambda m: m.convs[1].weight.requires_grad_(False),
    "one more call": lambda m: m.convs[1].register_forward_hook(lambda _, args, y: y * 1),
    "doubled": lambda m: m.norms[1].register_forward_hook(lambda _, args, y: torch.relu(y)),
}


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize("change", sorted(CHANGES.keys() - {"one more call"}))
def test_another_step_is_refused_under_a_budget(name, change):
    """In the same words, whichever way the steps before it went."""
    said = []
    for model in settled(name):
        CHANGES[change](model)
        with pytest.raises((gistkit.PlanMismatchError, gistkit.PlanError)) as refused:
            model(image())
        said.append(str(refused.value))
    assert said[0] == said[1]


def outcome(model, x):
    try:
        return step(model, x)[1:]
    except (gistkit.PlanMismatchError, gistkit.PlanError) as error:
        return str(error)


@pytest.mark.parametrize("name", ["open", "all anew", "75 %"])
@pytest.mark.parametrize("change", ["one more call", "strided", "not in place", "frozen", "evaluated"])
def test_a_changed_step_is_the_same_or_refused_alike(name, change):
    short, long = settled(name)
    for model in (short, long):
        CHANGES[change](model)
    for seed in (5, 6):
        held_off(long)
        assert outcome(short, image(seed=seed)) == outcome(long, image(seed=seed))


@pytest.mark.parametrize("name", ["open", "all anew", "75 %"])
def test_hooks_of_modules_run(name):
    seen = []
    models = settled(name)
    for model in models:
        model.first.register_forward_hook(lambda m, args, y: seen.append(y.shape))
        model.relu.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape))
        if name == "open":  # its views are calls, which no segment was planned with
            model.convs[1].register_full_backward_hook(lambda m, grad_in, grad_out: (grad_in[0] * 2,))
    for seed in (5, 6):
        agree(*models, image(seed=seed))
    assert len(seen) == 4 * 6


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


def stage(channels, inplace=False):
    return nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace)


def beside_a_checkpoint():
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    return nn.Sequential(*stage(3), Checkpointed(*stage(8, inplace=True)), *stage(8), *end)


@pytest.mark.parametrize("make", [Mixed, beside_a_checkpoint])
@pytest.mark.parametrize("forms", [{}, {"relu": ANEW}, {"conv2d": ANEW}, {"relu": ("zvc", "device")}])
def test_modules_beside_functions_and_checkpoints(make, forms):
    settled(by_hand(make, **forms), make, steps=4)
