"""Segments that run anew in backward: bits, bytes, random numbers.

Reference is plain PyTorch, bit for bit; bytes are counted by LiveBytes and are those of the simulator.
"""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.ir.plan import Decision, Plan
from gistkit.planning.forms.allowed import own_decisions
from gistkit.planning.policies.checkpoint import checkpoint
from tests.support.models import DenseNet, UNet, bottlenecks
from tests.support.peaks import steady_peak_bytes
from tests.support.recompute_cases import by_hand, by_pixel, captured, chain, measured, planned
from tests.support.training import assert_same, batches

NETS = {
    "dropout": (lambda: chain(dropout=0.3), 8, 4, F.cross_entropy),
    "bottlenecks": (bottlenecks, 32, 4, F.cross_entropy),
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
    assert sum(d.codec == "recompute" for d in plan.decisions) >= 4 and plan.details["segments"] > 1
    twin = gistkit.compress(copy.deepcopy(model), plan)
    assert_same(model, twin, data, loss_fn)
    assert measured(twin, *data[0], loss_fn) == steady_peak_bytes(graph, plan, costs)
    stats = gistkit.report(twin).stats
    assert stats.kept_bytes == plan.kept_bytes < 0.8 * plan.plain_bytes
    again = {r.storage: r.kept_bytes for r in stats.rows if r.codec == "recompute"}
    assert again == {d.storage: 0 for d in plan.decisions if d.codec == "recompute"}


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


def test_threads_of_their_own():
    model, (x, t) = chain(), batches(1, 2, 8)[0]
    twin = gistkit.compress(copy.deepcopy(model), planned(model, x, t))
    want = torch.autograd.grad(F.cross_entropy(model(x), t), list(model.parameters()))
    losses = [F.cross_entropy(twin(x), t) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(lambda loss: torch.autograd.grad(loss, list(twin.parameters())), losses):
            assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))


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


def test_a_dropout_of_nothing_has_no_mask_of_its_own():
    torch.manual_seed(0)
    convs = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
    layers = (m for conv in convs for m in (conv, nn.ReLU(), nn.Dropout(0.0)))
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 8 * 8, 10))
    data = [(torch.randn(2, 8, 8, 8), torch.randint(10, (2,))) for _ in range(3)]
    graph, costs = captured(model, *data[0])
    relus = [graph.values[c.results[0]].storage for c in graph.calls if c.op == "relu"]
    twin = gistkit.compress(copy.deepcopy(model), by_hand(graph, costs, relus[1:3], relus[:1]))
    assert_same(model, twin, data)
    assert not any(row.op == "dropout" for row in gistkit.report(twin).stats.rows)


class Scaled(nn.Module):
    """Multiplies by a number that a loop may change, which a rerun must take from its own forward."""

    def __init__(self):
        super().__init__()
        self.chain, self.factor = chain(), 1.0
        self.chain.blocks[1].register_module("scale", nn.Identity())

    def forward(self, x):
        for i, part in enumerate(self.chain.blocks):
            x = part(x) * self.factor if i in (1, 2) else part(x)
        return self.chain.head(x.flatten(1))


def test_numbers_and_sizes_that_change_between_forwards():
    torch.manual_seed(0)
    model, (x, t) = Scaled(), batches(1, 4, 8)[0]
    twin = gistkit.compress(copy.deepcopy(model), planned(model, x, t))
    results = {}
    for m in (model, twin):
        losses = []
        for rows, factor in ((4, 1.0), (4, 1.0), (2, 1.0), (4, 2.0), (4, 1.0), (2, 2.0)):
            m.factor = factor
            losses.append(F.cross_entropy(m(x[:rows]), t[:rows]))
        grads = [torch.autograd.grad(losses[i], list(m.parameters())) for i in (0, 3, 2, 1, 5, 4)]
        m.factor = 2.0
        grads.append(torch.autograd.grad(F.cross_entropy(m(x), t), list(m.parameters())))
        results[m is twin] = grads
    for want, got in zip(*results.values(), strict=True):
        assert all(map(torch.equal, want, got))


class Transposed(nn.Module):
    """Linear layers over rows in another order than memory's, which PyTorch copies behind autocast's cast."""

    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        for _ in range(2):
            x = x + self.narrow(torch.relu(self.wide(self.norm(x).transpose(0, 1))).transpose(0, 1))
        return self.head(x.mean(1))


def test_the_copy_that_a_linear_layer_makes_of_a_transposed_cast_comes_back():
    torch.manual_seed(0)
    plain, x, labels = Transposed(), torch.randn(8, 6, 16), torch.randint(10, (8,))

    def loss_of(out, labels):
        return torch.nn.functional.cross_entropy(out.float(), labels)

    model = copy.deepcopy(plain)
    with torch.autocast("cpu", torch.bfloat16):
        plan = gistkit.plan(plain, x, labels, loss_fn=loss_of, budget="85%", measure=False)
    assert any(d.codec == "recompute" for d in plan.decisions)
    gistkit.compress(model, plan)
    for each in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(each(x), labels)
        loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
