"""gistkit.GraphedStep without a GPU, where every call is a step; tests/gpu/test_cuda_graphs.py has the graphs."""

import copy
import gc
import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gistkit
from gistkit.runtime import compressed_forward
from gistkit.runtime.step import graphed
from gistkit.runtime.step.graphed import WARM_UP

X, TARGETS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).train()


def test_on_a_cpu_every_call_is_a_step():
    model = gistkit.compress(network())
    twin = copy.deepcopy(network())
    step = gistkit.GraphedStep(model, F.cross_entropy, sub_batches=2)
    for _ in range(WARM_UP + 3):
        model.zero_grad()
        twin.zero_grad()
        found = step(X, TARGETS)
        expected = gistkit.step(twin, F.cross_entropy, X, TARGETS, sub_batches=2)
        assert torch.equal(found, expected) and step.graph_bytes == 0
        grads = [[p.grad for p in m.parameters() if p.grad is not None] for m in (model, twin)]
        assert len(grads[0]) == 4 and all(map(torch.equal, *grads))


def test_a_graph_has_room_for_the_smallest_encodings_too():
    """Eager steps leave them out, as they cost the host more than they are worth; replays cost it nothing."""

    def made(**words):
        torch.manual_seed(0)
        widths = [3, *[64] * 8, *[1] * 20, 3]
        pairs = itertools.pairwise(widths)
        layers = [m for a, b in pairs for m in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())]
        return gistkit.compress(nn.Sequential(*layers, nn.Flatten()).train(), **words)

    def encoded(model):
        return sum(row.codec != "dense" for row in compressed_forward(model).engine.stats.rows)

    x, targets = torch.randn(2, 3, 32, 32), torch.tensor([1, 2])
    spared, whole = made(), made(min_gain=0)
    for model in (spared, whole):
        F.cross_entropy(model(x), targets).backward()
    assert 0 < encoded(spared) < encoded(whole)
    gistkit.GraphedStep(spared, F.cross_entropy)(x, targets)  # which plans anew what is planned already
    assert encoded(spared) == encoded(whole)
    later = made()
    gistkit.GraphedStep(later, F.cross_entropy)(x, targets)
    assert encoded(later) == encoded(whole)


def test_own_losses_are_compared_in_the_warm_up():
    step = gistkit.GraphedStep(network(), lambda out, t: F.cross_entropy(out, t) ** 2, sub_batches=2)
    with pytest.raises(ValueError, match="must return the mean over its rows"):
        step(X, TARGETS)


@pytest.mark.parametrize(
    ("words", "error", "why"),
    [
        ({"model": 1}, TypeError, "GraphedStep: model must be a torch.nn.Module, got int"),
        ({"loss_fn": 1}, TypeError, r"GraphedStep: loss_fn must be callable, got int; the order is GraphedStep\("),
        ({"warm_up": 1}, ValueError, "warm_up must be an int of at least 4, .* got 1; leave it out"),
        ({"sub_batches": 0}, ValueError, "GraphedStep: sub_batches must be None"),
        ({"verify": 1}, TypeError, "GraphedStep: verify must be True or False"),
    ],
)
def test_arguments_that_make_no_sense(words, error, why):
    words = {"model": network(), "loss_fn": F.cross_entropy, **words}
    with pytest.raises(error, match=why):
        gistkit.GraphedStep(words.pop("model"), words.pop("loss_fn"), **words)


def test_a_distributed_model_is_refused():
    model = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(model)
    with pytest.raises(TypeError, match="must be no DistributedDataParallel"):
        gistkit.GraphedStep(model, F.cross_entropy)


@pytest.fixture
def software_graph(monkeypatch):
    """In place of CUDA's: what is captured runs once, and a replay runs it again into the same tensors."""

    class Graph:
        step = None

        def replay(self):
            r = self.step
            grads, earlier = r._grads, [p.grad for p in r._parameters]
            r._model.zero_grad()
            found = r._work(*r._given)
            for own, p, before in zip((*grads, r._found), (*r._parameters, None), (*earlier, None), strict=True):
                own.copy_(found if p is None else p.grad)
                if p is not None:
                    p.grad = before

    monkeypatch.setattr(graphed, "device_of", lambda leaves: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    for name in ("graph", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **words: nullcontext())
    for name in ("memory_reserved", "get_sync_debug_mode", "set_sync_debug_mode", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    return Graph


def test_replays_add_up_and_refuse_what_they_were_not_captured_with(software_graph):
    model, twin = network(), network()
    step = gistkit.GraphedStep(model, F.cross_entropy)
    software_graph.step = step
    for call, clear in enumerate([True] * (WARM_UP + 2) + [False, False, True]):
        x, found = X + call, []
        for m, work in ((model, step), (twin, lambda x, t: gistkit.step(twin, F.cross_entropy, x, t))):
            if clear:
                m.zero_grad()
            found.append([work(x, TARGETS), *(p.grad.clone() for p in m.parameters())])
        assert all(map(torch.equal, *found)), call
    with pytest.raises(ValueError, match=r"\(6, 4\).*got \(\(5, 4\)"):
        step(X[:5], TARGETS[:5])
    model[0].weight.data = model[0].weight.data.clone()
    with pytest.raises(ValueError, match="some have moved"):
        step(X, TARGETS)


def test_nothing_is_collected_within_a_capture(software_graph):
    seen = []

    def loss_fn(out, targets):
        seen.append(gc.isenabled())
        return F.cross_entropy(out, targets)

    captured(software_graph, network(), loss_fn)
    assert all(seen[:WARM_UP]) and seen[-2:] == [False, True]  # the capture, and the software graph's replay


def captured(software_graph, model, loss_fn=F.cross_entropy):
    step = gistkit.GraphedStep(model, loss_fn)
    software_graph.step = step
    for _ in range(WARM_UP + 1):
        step(X, TARGETS)
    return step


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda model: model[0].eval(), r"parts in the other mode \['0'\], frozen \[\]; put it back"),
        (
            lambda model: model[0].weight.requires_grad_(False),
            r"parts in the other mode \[\], frozen \['0.weight'\]; put it back",
        ),
        (lambda model: model.__setitem__(1, nn.GELU()), "must find the modules that it was captured with"),
        (lambda model: model.__setitem__(2, nn.Linear(16, 3)), "some have moved"),
    ],
)
def test_a_model_that_has_changed_is_refused(software_graph, change, why):
    model = network()
    step = captured(software_graph, model)
    change(model)
    with pytest.raises(ValueError, match=why):
        step(X, TARGETS)


def test_a_batch_that_is_partly_elsewhere_is_refused(software_graph, monkeypatch):
    monkeypatch.setattr(graphed, "device_of", lambda leaves: torch.device("meta"))
    with pytest.raises(ValueError, match="whole batch on meta, got a tensor on cpu; move it there"):
        captured(software_graph, network())


def test_no_cast_of_earlier_weights_is_captured(software_graph):
    model, outs = network(), []
    with torch.autocast("cpu", torch.bfloat16):
        step = gistkit.GraphedStep(model, lambda out, t: outs.append(out.detach()) or F.cross_entropy(out, t))
        software_graph.step = step
        for _ in range(WARM_UP):
            step(X, TARGETS)
        model(X)  # leaves casts of its weights
        with torch.no_grad():
            model[0].weight.mul_(2)
        step(X, TARGETS)
        torch.clear_autocast_cache()
        assert torch.equal(outs[WARM_UP], model(X))


def test_a_batch_of_another_shape_before_the_capture_is_compared_again(software_graph):
    step = gistkit.GraphedStep(network(), F.cross_entropy)
    for _ in range(WARM_UP):
        step(X, TARGETS)
    assert step.bare
    step(X[:5], TARGETS[:5])
    assert not step.bare


def test_a_forward_that_replaces_its_buffers_is_refused(software_graph):
    model = network()
    model.register_buffer("seen", torch.zeros(()))
    model.register_forward_pre_hook(lambda m, given: setattr(m, "seen", m.seen + 1))
    with pytest.raises(gistkit.GistError, match="in their place; change them in place"):
        captured(software_graph, model)
    assert model.seen == WARM_UP


def test_memory_that_runs_out_in_the_capture_is_called_so(software_graph):
    model, calls = network(), []

    def loss_fn(out, t):
        calls.append(1)
        if len(calls) > WARM_UP:
            raise torch.OutOfMemoryError("none left")
        return F.cross_entropy(out, t)

    with pytest.raises(torch.OutOfMemoryError):
        captured(software_graph, model, loss_fn)
    assert all(p.grad is not None for p in model.parameters())
