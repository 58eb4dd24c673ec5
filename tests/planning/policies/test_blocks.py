"""Which modules may run anew whole, how many of them do, and when `optimal` has them do so."""

import random
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gistkit.api.planning import plan_graph
from gistkit.capture import capture
from gistkit.planning.cost import PRESETS, cost_table
from gistkit.planning.policies import POLICIES
from tests.support.models import Block, Blocks

H200, CPU = replace(PRESETS["h200"], libraries_bytes=0), PRESETS["cpu"]
IMAGES, CLASSES = torch.zeros(8, 3, 16, 16), torch.zeros(8, dtype=torch.long)


def graph_of(model):
    return capture(model, (IMAGES,), backward=True, loss_fn=F.cross_entropy, targets=(CLASSES,))


def blocks(model, budget=None, costs=lambda c: c):
    graph = graph_of(model)
    return POLICIES["blocks"](graph, costs(cost_table(graph, H200)), budget)


def test_as_few_of_the_first_modules_as_the_budget_needs():
    graph = graph_of(Blocks())
    costs = cost_table(graph, H200)
    plain = POLICIES["plain"](graph, costs)
    counts = []
    for share in (0.95, 0.8, 0.6, 0.4):
        plan = POLICIES["blocks"](graph, costs, int(share * plain.peak_bytes))
        assert plan.peak_bytes <= share * plain.peak_bytes and plan.details["trainable"] and plan.fidelity == "bitwise"
        assert plan.modules == tuple(f"blocks.{i}" for i in range(len(plan.modules)))
        assert plan.kept_bytes < plan.plain_bytes == plain.plain_bytes
        counts.append(len(plan.modules))
    assert counts == sorted(set(counts)) and counts[0] >= 1
    least = POLICIES["blocks"](graph, costs)
    assert len(least.modules) == 5, "backward begins with the last"
    assert least.peak_bytes <= plan.peak_bytes
    over = POLICIES["blocks"](graph, costs, least.peak_bytes // 2)
    assert over.modules == least.modules and not over.details["trainable"]
    assert POLICIES["blocks"](graph, costs, plain.peak_bytes).modules == ()


class OfAList(Block):
    def forward(self, x):
        return super().forward(x[0])


class Lists(Blocks):
    kind = OfAList

    def run(self, block, x, mask):
        return block([x])


class Twice(Blocks):
    def run(self, block, x, mask):
        return block(block(x))


class Doubling(Block):
    def forward(self, x):
        return super().forward(x.mul_(2))


class InPlace(Blocks):
    """Each block writes to what it is given."""

    kind = Doubling

    def run(self, block, x, mask):
        return block(x * 1)


class Later(Blocks):
    """What each block was given is written to behind it."""

    def run(self, block, x, mask):
        x = x + 2
        y = block(x)
        x.zero_()
        return y


class Gate(Block):
    def forward(self, x):
        return self.out(x).sigmoid()


class SavedTwice(Blocks):
    """Each block saves its own output, as the call behind it does."""

    kind = Gate

    def run(self, block, x, mask):
        return block(x).pow(2)


class Beside(Block):
    def forward(self, x):
        return super().forward(x + self.other)


class Unseen(Blocks):
    """Each block reads a tensor that it was not given."""

    kind = Beside

    def run(self, block, x, mask):
        block.other = x * 2
        return block(x)


def _gate(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


class Gated(Block):
    def forward(self, x):
        return self.gate(super().forward(x))


class Scripted(Blocks):
    """Each block ends with TorchScript, whose first calls save other tensors than later ones."""

    kind = Gated

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            Gated.gate = staticmethod(torch.jit.script(_gate))

    def run(self, block, x, mask):
        return block(x)


class Keeping(Block):
    def forward(self, x):
        y = super().forward(x)
        self.seen = y.mean()
        return y


class PutAway(Blocks):
    """Each block puts a tensor away, as a loss beside the model's."""

    kind = Keeping

    def run(self, block, x, mask):
        return block(x)


class Normed(Block):
    """Its batch norm updates what lasts."""

    def __init__(self, width, dropout):
        super().__init__(width, dropout)
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x):
        return super().forward(self.norm(x))


class Norms(Blocks):
    kind = Normed

    def run(self, block, x, mask):
        return block(x)


class Noisy(Block):
    """It draws from a generator of its own."""

    source = torch.Generator()

    def forward(self, x):
        return super().forward(x + torch.rand(x.shape, generator=self.source))


class Noises(Blocks):
    kind = Noisy

    def run(self, block, x, mask):
        return block(x)


class Tossed(Block):
    def forward(self, x):
        return super().forward(x) if random.random() < 2 else x


class Random(Blocks):
    """Each block draws from a generator that nobody sets back."""

    kind = Tossed

    def run(self, block, x, mask):
        return block(x)


@pytest.mark.parametrize(
    "kind", [Lists, Twice, InPlace, Later, SavedTwice, Unseen, PutAway, Norms, Noises, Random, Scripted]
)
def test_what_may_not_run_anew(kind):
    """None of the blocks; parts of one that are given all they read may."""
    found = blocks(kind()).modules
    assert not {f"blocks.{i}" for i in range(6)}.intersection(found)
    assert {f"blocks.{i}" for i in range(5)} <= set(blocks(Blocks()).modules)


def test_nothing_is_drawn_anew_in_a_cuda_graph():
    drawing = Blocks(dropout=0.1)
    assert any(name.count(".") == 1 for name in blocks(drawing).modules)
    within = blocks(drawing, costs=lambda c: c.in_cuda_graph()).modules
    assert within and not any(name.count(".") == 1 or "dropout" in name for name in within)


@pytest.mark.parametrize(("hardware", "whole"), [(H200, True), (CPU, False)])
def test_optimal_takes_whole_modules_where_the_host_sets_the_pace(hardware, whole):
    graph = graph_of(Blocks())
    costs = cost_table(graph, hardware)
    plan = plan_graph(graph, costs, budget="60%")
    assert bool(plan.modules) == whole and plan.policy == "optimal"
    assert plan.peak_bytes <= plan.budget_bytes
    if whole:
        assert plan.details["taken_from"] == "blocks" and plan.lower_bound_bytes <= plan.peak_bytes
        assert plan.step_s < plan_graph(graph, costs, budget="60%", policy="checkpoint").step_s


def test_optimal_lets_pytorch_run_what_fits_as_it_is():
    graph = graph_of(Blocks())
    plan = plan_graph(graph, cost_table(graph, H200), budget="100%")
    assert (plan.policy, plan.modules, plan.decisions) == ("plain", (), ())
    assert plan.step_s == plan.prediction.plain_step_s
