"""The runtime under an unchanged training loop: what it covers and what it refuses."""

import copy
import logging
import pickle
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.capture.nodes import reachable
from gistkit.errors import CompressError
from gistkit.runtime.announced import announced
from gistkit.runtime.stash.verify import same_bits
from tests.support.models import Checkpointed
from tests.support.step_cases import block, run
from tests.support.training import assert_same_gradients, assert_same_training, batches

ACTIVATIONS = [nn.GELU(), nn.ReLU6()]
POOLS = [nn.AdaptiveAvgPool2d(16), nn.MaxPool2d(2, 2, 0, 1), nn.MaxPool2d(17, 1)]


class Functional(nn.Module):
    """Functional calls, tensor methods, one ReLU called thrice, skip branches, concatenation."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.b = nn.Conv2d(16, 16, 3, padding=1)
        self.c = nn.Conv2d(32, 16, 3, padding=1, stride=2)
        self.norm = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.out = nn.Linear(16 * 64, 10)

    def forward(self, x):
        a = self.relu(self.norm(self.a(x)))
        b = F.relu(self.b(a)) + a
        b = self.relu(b)
        c = torch.cat((a, b.relu()), 1)
        c = self.relu(self.c(c))
        c = F.max_pool2d(F.dropout(c, 0.3, self.training), 3, 2, 1)
        return self.out(torch.sigmoid(c).flatten(1))


def test_functions_methods_and_shared_modules():
    assert_same_training(Functional(), batches(4, 4, 32))


@pytest.mark.parametrize(("at", "layer"), [*((1, act) for act in ACTIVATIONS), *((4, pool) for pool in POOLS)])
def test_other_activations_and_pools(at, layer):
    model = block()
    model[at] = layer
    assert_same_training(model, batches(2, 4, 32))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_a_part(reentrant):
    body = Checkpointed(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Dropout(0.2), reentrant=reentrant)
    head = nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4096, 10)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), body, *head)
    assert_same_training(model, batches(3, 4, 32))


def test_eval_and_no_grad_run_untouched_code():
    model, x = gistkit.compress(Functional()), torch.randn(2, 3, 32, 32)
    model.eval()
    out = model(x)
    assert "ConvolutionBackward0" in {n.name() for n in reachable([out])}
    model.train()
    with torch.no_grad():
        assert model(x).grad_fn is None
    assert gistkit.report(model).stats is None


def test_compress_changes_no_key_no_class_and_copies():
    model = block()
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    assert gistkit.compress(model) is model
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == classes
    run(model, batches(1, 4, 32)[0])
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        run(twin, batches(1, 4, 32)[0])
        assert gistkit.report(twin).stats is not None and twin.forward.model is twin
    gistkit.restore(model)
    assert "forward" not in vars(model)


class Changing(nn.Module):
    """Its control flow changes from step to step."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.b = nn.Conv2d(16, 16, 3, padding=1)
        self.way = 0

    def forward(self, x):
        h = self.a(x)
        y = F.relu(h)
        if self.way == 1:
            y = F.relu(self.b(y))
        if self.way == 4:
            return y.mean((1, 2, 3))
        return F.max_pool2d(y, 2).sum().reshape(1)


@pytest.mark.parametrize("way", [1, 4])
def test_control_flow_that_changes_stays_exact(way):
    def run(model, step):
        model.way = (0, 0, way, way, 0)[step]
        return model(torch.randn(4, 3, 32, 32)).sum()

    assert_same_gradients(Changing(), run, steps=5)


def test_hooks_and_retained_gradients_of_intermediate_tensors_are_plain_ones():
    class Retains(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 16, 3, padding=1)

        def forward(self, x):
            self.y = F.relu(self.conv(x))
            self.y.retain_grad()
            return F.max_pool2d(self.y, 2).sum().reshape(1)

    plain = Retains()
    twin = gistkit.compress(copy.deepcopy(plain))
    x = torch.randn(4, 3, 32, 32)
    for _ in range(2):
        plain(x).sum().backward()
        twin(x).sum().backward()
        assert same_bits(plain.y.grad, twin.y.grad)


def test_bad_arguments():
    model = gistkit.compress(block())
    with pytest.raises(CompressError, match=r"it is compressed already; call gistkit\.restore"):
        gistkit.compress(model)
    with pytest.raises(CompressError, match="its submodule '0' is compressed already"):
        gistkit.compress(nn.Sequential(model))
    with pytest.raises(CompressError, match=r"not compressed; call gistkit\.compress"):
        gistkit.restore(block())
    with pytest.raises(CompressError, match="not compressed"):
        gistkit.report(block())
    with pytest.raises(ValueError, match=r'lossy must be None or one of fp16, .*; got lossy="fp7"'):
        gistkit.compress(block(), lossy="fp7")
    plan = gistkit.plan(block(), batches(1, 2, 32)[0][0], policy="gist", fidelity="lossy", lossy="fp8")
    with pytest.raises(ValueError, match=r"lossy must be None or the plan's own format 'fp8', got 'fp16'; leave it ou"):
        gistkit.compress(block(), plan, lossy="fp16")
    with pytest.raises(ValueError, match="min_gain must be a share from 0 up to, but not, 1, got 1"):
        gistkit.compress(block(), min_gain=1)
    with pytest.raises(ValueError, match="on_cpu=True needs fake=True, got fake=False"):
        gistkit.capture(block(), batches(1, 2, 32)[0][:1], fake=False, on_cpu=True)
    with pytest.raises(ValueError, match="fidelity must be one of bitwise, reassociated, got 'exact'; bitwise changes"):
        gistkit.compress(block(), fidelity="exact")
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got function"):
        gistkit.compress(F.relu)
    with pytest.raises(TypeError, match=r"plan must be a gistkit\.Plan"):
        gistkit.compress(block(), {"policy": "gist"})


def test_a_long_block_is_announced_once(caplog):
    with caplog.at_level(logging.WARNING, logger="gistkit"), announced("first step of Net", after_s=0.01):
        deadline = time.monotonic() + 10
        while not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.01)
    assert caplog.messages == ["first step of Net: more than 0.01 s so far"]


def test_only_first_steps_are_watched(monkeypatch):
    seen = []
    monkeypatch.setattr("threading.Timer.start", lambda timer: seen.append(timer.args))
    model = gistkit.compress(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()))
    for _ in range(3):
        model(torch.randn(2, 3, 16, 16)).sum().backward()
    assert [what for _, what, _ in seen] == ["gistkit captures, plans and checks the first step of Sequential"]
