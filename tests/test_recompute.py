"""Segments that run anew in backward: bits, bytes, random numbers, lives, and what is refused.

Reference is plain PyTorch, bit for bit; bytes are counted by LiveBytes and are those of the simulator.
"""

import copy
import gc
import random
import re
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit import zoo
from gistkit.errors import PlanError
from gistkit.plan.cost import cost_table
from gistkit.plan.hardware import hardware
from gistkit.plan.plan import Decision, Plan
from gistkit.plan.policies.checkpoint import checkpoint
from gistkit.plan.policies.predicted import kept_by_ops, make_plan, own_decisions
from gistkit.plan.simulate import simulate
from gistkit.runtime import recompute_tape
from gistkit.runtime.live import LiveBytes
from tests.models import DenseNet, UNet
from tests.training import batches, train


def by_pixel(out, t):
    return F.cross_entropy(out, (t % 4)[:, None, None].expand(-1, *out.shape[2:]))


def block(inside, out, dropout=0.0):
    parts = [nn.Conv2d(inside, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts, *([nn.Dropout(dropout)] if dropout else []))


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


def planned(model, x, t, segments=3, loss_fn=F.cross_entropy, budget=None):
    graph, costs = captured(model, x, t, loss_fn)
    return checkpoint(graph, costs, budget, segments=segments)


def by_hand(graph, costs, storages, sources, **words):
    again = [Decision(s, "recompute", "nowhere", sources=tuple(sources), **words) for s in storages]
    return make_plan("by hand", graph, costs, None, (*own_decisions(graph), *again))


def between(graph, costs=None):
    """A plan in which all that is kept between the first ReLU's output and the third's comes back; no figures without
    costs."""
    relus = [graph.values[c.results[0]].storage for c in graph.calls if c.op == "relu"]
    own = {d.storage for d in own_decisions(graph)} | kept_by_ops(graph)
    found = [s.id for s in graph.kept() if relus[0] < s.id < relus[2] and s.kind == "activation" and s.id not in own]
    if costs is None:
        again = [Decision(s, "recompute", "nowhere", sources=(relus[0],)) for s in found]
        return Plan("by hand", graph.fingerprint, tuple(again), ())
    return by_hand(graph, costs, found, relus[:1])


def assert_same(model, twin, data, loss_fn=F.cross_entropy):
    plain, other = train(model, data, loss_fn), train(twin, data, loss_fn)
    assert torch.equal(torch.stack(plain.losses), torch.stack(other.losses))
    for want, got in ((plain.state, other.state), (plain.grads, other.grads)):
        assert want.keys() == got.keys()
        for name in want:
            assert torch.equal(want[name], got[name]), name


def measured(model, x, t, loss_fn=F.cross_entropy):
    """Peak of live bytes over a step, all that was there before counted."""
    model.zero_grad()
    with LiveBytes() as live:
        live.track(model, x, t)
        loss_fn(model(x), t).backward()
    return live.peak_bytes


NETS = {
    "chain": (chain, 8, 4, F.cross_entropy),
    "dropout": (lambda: chain(dropout=0.3), 8, 4, F.cross_entropy),
    "vgg16": (lambda: zoo.MODELS["vgg16"](num_classes=10, image_size=32), 32, 5, F.cross_entropy),
    "resnet50": (lambda: zoo.MODELS["resnet50"](num_classes=10, image_size=32), 32, 5, F.cross_entropy),
    "googlenet": (lambda: zoo.MODELS["googlenet"](num_classes=10, image_size=32), 32, 4, F.cross_entropy),
    "densenet": (DenseNet, 8, 4, F.cross_entropy),
    "unet": (UNet, 8, 3, by_pixel),
}


@pytest.mark.parametrize("name", NETS)
def test_bits_and_bytes_of_a_checkpoint(name):
    make, size, segments, loss_fn = NETS[name]
    torch.manual_seed(0)
    model = make()
    data = batches(3, 2, size)
    graph, costs = captured(model, *data[0], loss_fn)
    plan = checkpoint(graph, costs, segments=segments)
    assert sum(d.codec == "recompute" for d in plan.decisions) >= 4 and plan.settings["segments"] > 1
    twin = gistkit.compress(copy.deepcopy(model), plan)
    assert_same(model, twin, data, loss_fn)
    assert measured(twin, *data[0], loss_fn) == simulate(graph, plan, costs).peak_bytes
    stats = gistkit.report(twin).stats
    assert stats.kept_bytes == plan.kept_bytes < 0.8 * plan.plain_bytes
    again = {r.storage: r.kept_bytes for r in stats.rows if r.codec == "recompute"}
    assert again == {d.storage: 0 for d in plan.decisions if d.codec == "recompute"}


def test_random_numbers_go_on_as_if_nothing_had_run_anew():
    model, (x, t) = chain(dropout=0.5), batches(1, 2, 8)[0]
    twin = gistkit.compress(copy.deepcopy(model), planned(model, x, t))
    drawn = []
    for m in (model, twin, twin):
        torch.manual_seed(3)
        F.cross_entropy(m(x), t).backward()
        drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])


def test_a_segment_runs_once():
    model, (x, t) = chain(), batches(1, 2, 8)[0]
    plan = planned(model, x, t)
    twin = gistkit.compress(model, plan)
    F.cross_entropy(twin(x), t).backward()
    with LiveBytes() as live:
        F.cross_entropy(twin(x), t).backward()
    graph, _ = captured(gistkit.restore(model), x, t)
    count = [e.op for e in live.timeline if e.backward].count("aten::convolution")
    again = {d.storage for d in plan.decisions if d.codec == "recompute"}
    # what makes a convolution's output, and what makes it of it, run anew; the last segment and boundaries do not
    convolutions = [c for c in graph.calls if c.op == "conv2d" and set(c.writes) & again]
    assert 0 < len(convolutions) <= count < sum(c.op == "conv2d" for c in graph.calls)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3) for i in range(3))

    def forward(self, x):
        y = self.convs[0](x)
        return [torch.tanh(conv(torch.tanh(y))).tanh() for conv in self.convs[1:]]


def test_what_nobody_wants_any_more_is_not_made():
    model, (x, _) = Branches(), batches(1, 2, 8)[0]
    graph = gistkit.capture(model, (x,), on_cpu=True)
    kept = [s.id for s in graph.kept() if s.kind == "activation" and not s.escapes]
    again = tuple(Decision(s, "recompute", "nowhere") for s in kept)
    twin = gistkit.compress(model, Plan("by hand", graph.fingerprint, again, ()))
    twin(x)
    outs = twin(x)
    with LiveBytes() as live:
        outs.pop().sum().backward()
        both = [e.op for e in live.timeline].count("aten::convolution")
        outs.clear()
    outs = twin(x)
    del outs[0]
    with LiveBytes() as live:
        outs.pop().sum().backward()
    one = [e.op for e in live.timeline].count("aten::convolution")
    assert (both, one) == (3, 2)


class Wide(nn.Module):
    """Scales by what much wider maps come to, which backward never asks for."""

    def __init__(self):
        super().__init__()
        self.up = nn.Conv2d(3, 256, 1)

    def forward(self, x):
        with torch.no_grad():
            scale = (self.up(x) * 2).sum((1, 2, 3), keepdim=True)
        return x * scale.sigmoid()


def test_the_replays_own_peak_is_foreseen():
    torch.manual_seed(0)
    model, (x, t) = (
        nn.Sequential(nn.Conv2d(3, 3, 1), Wide(), nn.Conv2d(3, 8, 1), nn.Flatten(), nn.Linear(512, 10)),
        (batches(1, 4, 8)[0]),
    )
    graph, costs = captured(model, x, t)
    scaled = [c for c in graph.calls if c.op == "mul"][-1]
    found = [s.storage for s in scaled.saves if graph.storages[s.storage].shape == (4, 1, 1, 1)]
    plan = by_hand(graph, costs, found, (graph.values[scaled.operands[0]].storage,))
    run = simulate(graph, plan, costs)
    assert graph.tasks[run.peak_task].phase == "backward"
    twin = gistkit.compress(model, plan)
    measured(twin, x, t)
    assert measured(twin, x, t) == run.peak_bytes


def test_nothing_is_left_behind():
    model, (x, t) = chain(dropout=0.2), batches(1, 2, 8)[0]
    twin = gistkit.compress(model, planned(model, x, t))
    F.cross_entropy(twin(x), t).backward()
    with LiveBytes() as live:
        loss = F.cross_entropy(twin(x), t)
        kept = live.current_bytes
        loss.backward()
        del loss
        left = live.current_bytes
        for _ in range(2):
            F.cross_entropy(twin(x), t).backward()
        assert live.current_bytes == left
        out = twin(x)
        del out
        gc.collect()
        assert live.current_bytes == left < kept


class Stumbling(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.stumble = inner, False

    def forward(self, x):
        y = self.inner.blocks(x)
        if self.stumble:
            raise ArithmeticError("stumbled")
        return self.inner.head(y.flatten(1))


def test_an_exception_in_forward_leaves_nothing():
    model, (x, t) = Stumbling(chain()), batches(1, 2, 8)[0]
    twin = gistkit.compress(model, planned(model, x, t))
    for _ in range(2):
        F.cross_entropy(twin(x), t).backward()
    with LiveBytes() as live:
        model.stumble = True
        with pytest.raises(ArithmeticError):
            twin(x)
        gc.collect()
        assert live.current_bytes == 0
    model.stumble = False
    F.cross_entropy(twin(x), t).backward()


def test_retained_graphs_and_second_uses():
    model, (x, t) = chain(), batches(1, 2, 8)[0]
    twin = gistkit.compress(copy.deepcopy(model), planned(model, x, t))
    for m in (model, twin):
        loss = F.cross_entropy(m(x), t)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_two_forwards_before_their_backwards():
    model, data = chain(dropout=0.3), batches(2, 2, 8)
    twin = gistkit.compress(copy.deepcopy(model), planned(model, *data[0]))
    for m in (model, twin):
        torch.manual_seed(5)
        losses = [F.cross_entropy(m(x), t) for x, t in data]
        for loss in reversed(losses):
            loss.backward()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_some_of_the_gradients():
    model, (x, t) = chain(), batches(1, 2, 8)[0]
    twin = gistkit.compress(copy.deepcopy(model), planned(model, x, t))
    for at in (0, 3, 5):
        found = []
        for m in (model, twin):
            m.zero_grad()
            found.append(torch.autograd.grad(F.cross_entropy(m(x), t), m.blocks[at][0].weight)[0])
        assert torch.equal(*found)


def test_other_sizes_under_the_same_plan():
    model, data = chain(), [*batches(1, 4, 8), *batches(1, 3, 8), *batches(1, 4, 8)]
    twin = gistkit.compress(copy.deepcopy(model), planned(model, *data[0]))
    assert_same(model, twin, data)


def test_autocast_is_as_in_forward():
    model, data = chain(), batches(2, 2, 8)

    def loss_fn(out, t):
        return F.cross_entropy(out.float(), t)

    def run(m):
        torch.manual_seed(1)
        for x, t in data:
            with torch.autocast("cpu", torch.bfloat16):
                out = m(x)
            loss_fn(out, t).backward()
        return [p.grad.clone() for p in m.parameters()]

    with torch.autocast("cpu", torch.bfloat16):
        plan = planned(model, *data[0], loss_fn=loss_fn)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    assert all(torch.equal(a, b) for a, b in zip(run(model), run(twin), strict=True))
    casts = [r for r in gistkit.report(twin).stats.rows if r.codec == "recompute"]
    assert len(casts) == sum(d.codec == "recompute" for d in plan.decisions)


def test_threads_of_their_own():
    model, (x, t) = chain(), batches(1, 2, 8)[0]
    twin = gistkit.compress(copy.deepcopy(model), planned(model, x, t))
    want = torch.autograd.grad(F.cross_entropy(model(x), t), list(model.parameters()))
    losses = [F.cross_entropy(twin(x), t) for _ in range(4)]
    found = {}

    def work(i):
        found[i] = torch.autograd.grad(losses[i], list(twin.parameters()))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for i in range(4) for a, b in zip(want, found[i], strict=True))


class Parts(nn.Module):
    """Views, an in-place sum of views, a boundary that autograd keeps nothing of, a call whose insides are kept."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        y = self.first(x) * 2
        a, b = y.chunk(2, 1)
        c = torch.cat([torch.sigmoid(a), self.second(b)], 1)
        c[:, 1:3] += b[:, :2]
        c = F.local_response_norm(torch.tanh(c), 3)
        c = F.layer_norm(c, c.shape[2:])
        return self.last(c).mean((2, 3))


def test_views_insides_and_a_boundary_that_nobody_saves():
    torch.manual_seed(0)
    model, data = Parts(), batches(3, 2, 8, classes=8)
    graph, costs = captured(model, *data[0])
    product = next(c for c in graph.calls if c.op == "mul")
    (source,) = {graph.values[v].storage for v in product.results}
    kept = {s.id for s in graph.kept() if s.kind == "activation" and s.producer > product.index and not s.escapes}
    plan = by_hand(graph, costs, sorted(kept - {source} - {d.storage for d in own_decisions(graph)}), (source,))
    twin = gistkit.compress(copy.deepcopy(model), plan)
    assert_same(model, twin, data)
    rows = gistkit.report(twin).stats.rows
    assert {r.storage for r in rows if r.codec == "recompute"} == {
        d.storage for d in plan.decisions if d.codec == "recompute"
    }


class Overwritten(nn.Module):
    """A sigmoid's result, which its backward reads, and what then overwrites it, which a convolution's reads."""

    def __init__(self, inplace):
        super().__init__()
        self.first, self.last, self.inplace = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), inplace

    def forward(self, x):
        y = self.first(x).sigmoid()
        y = y.mul_(2) if self.inplace else y * 2
        return self.last(y).mean((2, 3))


def test_values_are_those_of_the_time_at_which_they_were_saved():
    torch.manual_seed(0)
    model, data = Overwritten(False), batches(3, 2, 8, classes=8)
    twin = Overwritten(True)
    twin.load_state_dict(model.state_dict())
    graph = gistkit.capture(twin, data[0][:1], on_cpu=True)
    sigmoid = next(c for c in graph.calls if c.op == "sigmoid")
    again = Decision(graph.values[sigmoid.results[0]].storage, "recompute", "nowhere")
    # plain PyTorch refuses that backward; what it would be is what it is out of place
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        twin(data[0][0]).sum().backward()
    assert_same(model, gistkit.compress(twin, Plan("by hand", graph.fingerprint, (again,), ())), data)
    assert [r.codec for r in gistkit.report(twin).stats.rows].count("recompute") == 2


def test_a_mask_beside_what_runs_anew():
    model, data = chain(), batches(3, 2, 8)
    graph, costs = captured(model, *data[0])
    relus = [graph.values[c.results[0]].storage for c in graph.calls if c.op == "relu"]
    plan = by_hand(graph, costs, relus[1:3], (relus[0],), mask=True)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    assert_same(model, twin, data)
    assert measured(twin, *data[0]) == simulate(graph, plan, costs).peak_bytes


@pytest.mark.parametrize("form", [("zvc", "device"), ("dense", "host"), ("zvc", "host")])
def test_sources_in_other_forms(form):
    codec, place = form
    model, data = chain(), batches(3, 4, 8)
    graph, costs = captured(model, *data[0])
    found = between(graph, costs)
    (source,) = next(d.sources for d in found.decisions if d.codec == "recompute")
    plan = replace(found, decisions=(*found.decisions, Decision(source, codec, place)))
    twin = gistkit.compress(copy.deepcopy(model), plan)
    assert_same(model, twin, data)
    codecs = [r.codec for r in gistkit.report(twin).stats.rows]
    assert codec in codecs and codecs.count("recompute") == len(found.decisions)


class Residual(nn.Module):
    """relu(bn(conv) + x) out of place: what the Gist policy rebuilds, overwrites, and gives to the pool's map."""

    def __init__(self, pool=False):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.norms, self.pool = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2)), pool

    def forward(self, x):
        y = torch.relu(self.norms[0](self.convs[0](x)))
        y = torch.relu(self.norms[1](self.convs[1](y)) + x)
        return F.max_pool2d(torch.relu(y * 2), 3, 1, 1) if self.pool else y


@pytest.mark.parametrize("seed", range(6))
def test_beside_the_moves_of_another_policy(seed):
    torch.manual_seed(0)
    parts = [Residual(pool=i % 2 == 0) for i in range(4)]
    model, data = Chain(nn.Conv2d(3, 16, 1), *parts, width=16), batches(3, 4, 8)
    graph, costs = captured(model, *data[0])
    other = gistkit.policies.gist(graph)
    own = {d.storage for d in own_decisions(graph)} | kept_by_ops(graph)
    kept = {d.storage: d for d in other.decisions}
    able = [s.id for s in graph.kept() if s.kind == "activation" and s.id not in own and not s.escapes]
    able = [s for s in able if kept.get(s) is None or kept[s].codec in ("dense", "zvc", "csr", "rebuild")]
    chosen = random.Random(seed).sample(able, len(able) // 2)
    source = next(s.id for s in graph.storages if s.kind == "input")
    again = [Decision(s, "recompute", "nowhere", bool(kept[s].mask), (source,)) for s in chosen]
    rest = [d for d in other.decisions if d.storage not in chosen]
    plan = make_plan("by hand", graph, costs, None, (*rest, *again), other.choices)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    assert_same(model, twin, data)
    rows = {r.storage: r.codec for r in gistkit.report(twin).stats.rows}
    assert [rows[s] for s in chosen] == ["recompute"] * len(chosen)
    assert measured(twin, *data[0]) == simulate(graph, plan, costs).peak_bytes


def test_a_written_parameter_is_pytorchs_error():
    model, (x, t) = chain(), batches(1, 2, 8)[0]
    twin = gistkit.compress(model, planned(model, x, t))
    F.cross_entropy(twin(x), t).backward()
    loss = F.cross_entropy(twin(x), t)
    with torch.no_grad():
        # which no backward reads, but the replay does
        for part in model.blocks:
            part[1].bias.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* is at version \d+; expected version"):
        loss.backward()


def test_what_does_not_come_back_stays(monkeypatch):
    model, data = chain(), batches(3, 2, 8)
    plan = planned(model, *data[0])
    monkeypatch.setattr(recompute_tape, "same_bits", lambda a, b: False)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    assert_same(model, twin, data)
    rows = {r.storage: r for r in gistkit.report(twin).stats.rows}
    for decision in plan.decisions:
        if decision.codec == "recompute":
            row = rows[decision.storage]
            assert (row.codec, row.kept_bytes) == ("dense", row.plain_bytes)
            assert row.reason == "not recompute as planned: it does not come back bit for bit on this device"


def test_a_budget_refuses_what_does_not_come_back(monkeypatch):
    model, (x, t) = chain(), batches(1, 2, 8)[0]
    plan = planned(model, x, t, budget=10**9)
    monkeypatch.setattr(recompute_tape, "same_bits", lambda a, b: False)
    twin = gistkit.compress(model, plan)
    with pytest.raises(PlanError, match=r"budget cannot be kept: storage \d+ \(.*'recompute', and it does not come"):
        twin(x)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Own(nn.Module):
    """A custom Function: what its forward calls is seen like any other call."""

    def forward(self, x):
        return Twice.apply(x)


class Unseen(torch.autograd.Function):
    """As one whose forward is a kernel of its own: no function mode sees what it does."""

    @staticmethod
    def forward(ctx, x):
        with torch._C.DisableTorchFunction():
            return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Hidden(nn.Module):
    def forward(self, x):
        return Unseen.apply(x)


class Counts(nn.Module):
    """A norm that updates running statistics by a call that is not batch_norm."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x):
        return F.instance_norm(x, self.mean, self.var, use_input_stats=True)


class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = None

    def forward(self, x):
        noise = torch.rand(x.shape, generator=self.generator)
        return x * noise


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (
            Hidden,
            r"recompute runs Unseen of .*anew, which is no call of a torch function .*; keep what it makes",
        ),
        (
            Counts,
            r"recompute runs instance_norm of blocks.2 .* anew, which writes to storage \d+ \(buffer\) that out",
        ),
    ],
)
def test_what_cannot_run_anew_is_refused_by_name(part, text):
    torch.manual_seed(0)
    model = Chain(block(3, 8), block(8, 8), part(), block(8, 8), block(8, 8))
    x = torch.randn(2, 3, 8, 8)
    plan = between(gistkit.capture(model, (x,), on_cpu=True))
    with pytest.raises(PlanError, match=text):
        gistkit.compress(model, plan)(x)


def test_a_custom_function_runs_anew_by_what_it_calls():
    torch.manual_seed(0)
    model, data = Chain(block(3, 8), block(8, 8), Own(), block(8, 8), block(8, 8)), batches(3, 2, 8)
    plan = between(*captured(model, *data[0]))
    twin = gistkit.compress(copy.deepcopy(model), plan)
    assert_same(model, twin, data)
    assert measured(twin, *data[0]) < measured(model, *data[0])


def test_a_generator_of_the_models_own_is_refused():
    torch.manual_seed(0)
    model = Chain(block(3, 8), block(8, 8), Drawn(), block(8, 8), block(8, 8))
    data = batches(2, 2, 8)
    plan = between(*captured(model, *data[0]))
    twin = gistkit.compress(copy.deepcopy(model), plan)
    assert_same(model, twin, data)
    twin.blocks[2].generator = torch.Generator()
    with pytest.raises(PlanError, match=r"rand of blocks.2 \(call \d+\) anew, whose argument of type Generator cannot"):
        twin(data[0][0])


def test_sources_must_be_kept_and_ops_keep_their_own():
    model, (x, t) = chain(), batches(1, 2, 8)[0]
    graph, costs = captured(model, x, t)
    relus = [graph.values[c.results[0]].storage for c in graph.calls if c.op == "relu"]
    with pytest.raises(PlanError, match=rf"from storage {relus[1]}, which 'recompute' does not keep with its values"):
        make_plan(
            "by hand", graph, costs, None,
            [Decision(b, "recompute", "nowhere", sources=(a,)) for a, b in pairwise(relus[:3])],
        )  # fmt: skip
    norm = next(c for c in graph.calls if c.op == "batch_norm")
    mean = next(s.storage for s in norm.saves if graph.storages[s.storage].shape == (8,) and s.storage in norm.writes)
    plan = by_hand(graph, costs, [mean], relus[:1])
    with pytest.raises(PlanError, match=re.escape("recompute, but batch_norm of blocks.0.1 keeps it for itself")):
        gistkit.compress(model, plan)(x)
