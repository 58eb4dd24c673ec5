"""gistkit.nn's classes against torch.nn's: constructors, state dicts, results, what runs in eval()."""

import copy
import pickle

import pytest
import torch

import gistkit.nn as gnn
from gistkit.nn import modules
from tests.support.nn_cases import planted, same_bits

FUNCTIONS = ("conv2d", "dropout", "keep_input", "linear", "max_pool2d", "relu", "relu_max_pool2d")
IMAGE = (4, 6, 9, 8)
CASES = {
    "ReLU": (),
    "MaxPool2d": (3, 2, 1),
    "Conv2d": (6, 4, 3, 1, "same", 1, 2, False),
    "Linear": (8, 5),
    "BatchNorm2d": (6, 1e-5, None),
    "Dropout": (0.2,),
}


def _step(module, x, times=2):
    """Outputs, gradients, buffers and the random state after some steps over x."""
    torch.manual_seed(7)
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    module.zero_grad()
    outputs = []
    for _ in range(times):
        y = module(x * 1)
        outputs.append(y.detach().clone())
        (y * torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)).sum().backward()
    gradients = [p.grad for p in module.parameters()]
    return [*outputs, x.grad, *gradients, *(b.clone() for b in module.buffers()), torch.get_rng_state()]


@pytest.mark.parametrize("name, args", CASES.items())
def test_same_face(name, args):
    made = []
    for nn in (gnn, torch.nn):
        torch.manual_seed(2)
        made.append(getattr(nn, name)(*args))
    own, plain = made
    assert isinstance(own, getattr(torch.nn, name))
    assert repr(own) == repr(plain)
    assert list(own.state_dict()) == list(plain.state_dict())
    assert all(same_bits(a, b) for a, b in zip(own.state_dict().values(), plain.state_dict().values(), strict=True))
    plain.load_state_dict(own.state_dict())
    assert repr(copy.deepcopy(own)) == repr(pickle.loads(pickle.dumps(own))) == repr(own)


@pytest.mark.parametrize("name", [*CASES, "ReLUMaxPool2d"])
def test_nothing_of_gistkit_runs_in_eval_or_without_gradients(name, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("gistkit's function ran")

    for f in FUNCTIONS:
        monkeypatch.setattr(modules, f, refuse)
    cls = getattr(gnn, name)
    module = cls(*CASES.get(name, (2,)))
    x = planted(IMAGE, special=False)
    with torch.no_grad():
        module(x)
    module.eval()
    module(x.requires_grad_()).sum().backward()
    with pytest.raises(AssertionError, match="gistkit's function ran"):
        module.train()(x)


@pytest.mark.parametrize("name, args", [("Conv2d", (6, 4, 3)), ("Linear", (8, 5)), ("BatchNorm2d", (6,))])
def test_codec(name, args):
    own, plain = getattr(gnn, name)(*args, codec="zvc"), getattr(torch.nn, name)(*args)
    plain.load_state_dict(own.state_dict())
    x = torch.relu(planted(IMAGE, special=False))
    assert all(same_bits(a, b) for a, b in zip(_step(own, x), _step(plain, x), strict=True))
    assert repr(own) == repr(plain)[:-1] + ", codec='zvc')"
    assert repr(pickle.loads(pickle.dumps(own))) == repr(own)
    if name != "BatchNorm2d":  # whose node is PyTorch's own
        node = own(x.requires_grad_()).grad_fn
        node = node if hasattr(node, "kept") else node.next_functions[0][0]  # behind a view
        assert node.kept[0].encoded.codec == "zvc"
    # lossy, so that a codec that is not used would show
    lossy = getattr(gnn, name)(*args, codec="fp8")
    lossy.load_state_dict(own.state_dict())
    assert not torch.equal(_step(lossy, x.detach())[3], _step(plain, x.detach())[3])


@pytest.mark.parametrize("name, args", [("Conv2d", (6, 4, 3)), ("Linear", (8, 5)), ("BatchNorm2d", (6,))])
def test_unknown_codec(name, args):
    with pytest.raises(ValueError, match=r"codec: name must be one of dense, .*; got 'zvcc'; did you mean 'zvc'\?"):
        getattr(gnn, name)(*args, codec="zvcc")
