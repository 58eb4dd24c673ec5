"""Calls that PyTorch's own op carries out as planned: which they are, that the bits are the same, and how many nodes of
a step are Python's."""

import copy

import pytest
import torch
from torch import nn

import gistkit
from gistkit import zoo
from gistkit.nn import standin
from gistkit.runtime.calls import native
from tests.support.nn_cases import same_bits

top_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]
OWN, PYTORCHS = "_Conv2dBackward", "ConvolutionBackward0"
ELEMENTS = 4 * 8 * 10 * 10


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1))


def norms():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), *blocks, nn.Conv2d(8, 2, 1))


X = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def nodes(loss):
    """Names of all backward nodes, in no order."""
    seen, names, pending = set(), [], [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.append(node.name())
            pending.extend(edge for edge, _ in node.next_functions)
    return names


def step(model, x=X):
    """(names of the backward nodes, every gradient and buffer) of one step."""
    model.zero_grad()
    loss = model(x).square().sum()
    names = nodes(loss)
    loss.backward()
    return names, [p.grad for p in model.parameters()] + [b.clone() for b in model.buffers()]


def second_step(model, **options):
    """The step after the one that was captured."""
    model = gistkit.compress(model, **options)
    step(model)
    return step(model)


def second_plain_step(model):
    step(model)
    return step(model)[1]


@pytest.mark.parametrize(("limit", "own"), [(0, 2), (ELEMENTS * 4 - 1, 1), (ELEMENTS * 4, 0)])
def test_small_inputs_are_pytorchs_own_convolutions(limit, own, monkeypatch):
    monkeypatch.setattr(native, "JOINT_BYTES", {"cpu": limit})
    names, grads = second_step(convolutions())
    # the first has no input gradient to take, so it is PyTorch's whatever its size
    assert (names.count(OWN), names.count(PYTORCHS)) == (own, 3 - own)
    assert all(map(same_bits, grads, second_plain_step(convolutions())))


def test_on_the_cpu_no_input_is_small():
    assert set(native.JOINT_BYTES) == {"cuda"}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", [convolutions, norms])
def test_the_plan_holds_for_what_pytorchs_ops_save(make, autocast, monkeypatch):
    monkeypatch.setattr(native, "JOINT_BYTES", {"cpu": 2**30})
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model = gistkit.compress(make())
        step(model)
        names, grads = step(model)
        kept = {r.codec: r for r in model.forward.engine.stats.rows}
        want = second_plain_step(make())
    assert OWN not in names and all(map(same_bits, grads, want))
    assert kept["rebuild" if make is norms else "zvc"].storage >= 0, "decided by the plan, not from the tensor alone"


def test_an_input_that_nobody_stashed_is_kept_as_its_decision_says(monkeypatch):
    monkeypatch.setattr(native, "JOINT_BYTES", {"cpu": 2**30})
    model = gistkit.compress(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 2, 1)), lossy="fp8")
    names, _ = step(model)
    narrow = [r for r in model.forward.engine.stats.rows if r.codec == "fp8"]
    assert OWN not in names and len(narrow) > 1 and all(r.storage >= 0 for r in narrow)


@pytest.mark.parametrize("given", [False, True])
def test_a_plan_of_the_callers_keeps_its_peak(given, monkeypatch):
    monkeypatch.setattr(native, "JOINT_BYTES", {"cpu": 2**30})
    model = convolutions()
    plan = gistkit.plan(model, X, policy="gist", loss_fn=torch.sum) if given else None
    names, _ = second_step(model, plan=plan)
    assert (OWN in names) == given


def test_a_frozen_weight_keeps_no_input(monkeypatch):
    monkeypatch.setattr(native, "JOINT_BYTES", {"cpu": 2**30})
    model = convolutions()
    model[2].weight.requires_grad_(False)
    names, _ = second_step(model)
    assert names.count(OWN) == 1


def test_batch_norms_that_keep_their_input_are_pytorchs():
    names, grads = second_step(norms())
    assert names.count("NativeBatchNormBackward0") == 3 and "_BatchNormBackward" not in names
    assert all(map(same_bits, grads, second_plain_step(norms())))


@pytest.mark.parametrize("given", [False, True])
def test_a_batch_norm_of_a_stash_is_pytorchs_but_for_a_plan_of_the_callers(given):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1))
    plain = second_plain_step(copy.deepcopy(model))
    plan = gistkit.plan(model, X, policy="gist", loss_fn=torch.sum) if given else None
    names, grads = second_step(model, plan=plan)
    assert ("_BatchNormBackward" in names) == given and all(map(same_bits, grads, plain))


def test_the_hooks_are_back_after_a_batch_norm():
    class Then(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norms()
            self.seen = []

        def forward(self, x):
            y = self.norm[1](self.norm[0](x))
            self.seen.append(top_hooks(False))
            return y

    model = gistkit.compress(Then())
    step(model)
    assert model.seen[-1] is not None
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.ones(1, 3, 1, 1))
    assert top_hooks(False) is None


@pytest.fixture
def backward_calls(monkeypatch):
    """Calls of convolution_backward from Python."""
    seen = []
    real = standin.Geometry.backward

    def backward(self, *args):
        seen.append(args)
        return real(self, *args)

    monkeypatch.setattr(standin.Geometry, "backward", backward)
    return seen


@pytest.mark.parametrize(
    ("limits", "convolutions", "calls"), [({}, 52, 104), ({"cpu": 0}, 51, 102), ({"cpu": 2**30}, 0, 0)]
)
def test_the_python_nodes_of_a_resnet50(limits, convolutions, calls, backward_calls, monkeypatch):
    """Of two images of 64x64 one convolution alone has room for its input beside the gradients of all weights."""
    monkeypatch.setattr(native, "JOINT_BYTES", limits)
    torch.manual_seed(0)
    model = gistkit.compress(zoo.load("resnet50", num_classes=10, image_size=64))
    x = torch.randn(2, 3, 64, 64)
    step(model, x)
    backward_calls.clear()
    names, _ = step(model, x)
    python = {n: names.count(n) for n in set(names) if n.startswith("_")}
    want = {OWN: convolutions, "_ReLUBackward": python["_ReLUBackward"], "_LinearBackward": 1}
    want["_MaskedReLUBackward"] = 49 - python["_ReLUBackward"]
    assert python == {n: c for n, c in want.items() if c} | {n: c for n, c in python.items() if "Pool" in n}
    assert len(backward_calls) == calls
