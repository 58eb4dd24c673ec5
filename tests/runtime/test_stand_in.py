"""A compressed model's forward looks like the model's own, is found in wrappers, and goes with copies or refuses."""

import copy
import functools
import inspect
import pickle
import types
import typing

import pytest
import torch
from torch import nn

import gistkit
from gistkit.capture.nodes import reachable
from gistkit.errors import CompressError
from gistkit.runtime.attach import compressed_forward
from tests.support.training import assert_same, batches

DATA = batches(2, 4, 14)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Linear(288, 10)

    def forward(self, images: torch.Tensor, scale: float = 1.0, *, half: bool = False) -> torch.Tensor:
        """Scores of the classes."""
        y = self.head(self.body(images)) * scale
        return y / 2 if half else y


def own_forward(images: int, flag=True):
    """Of this instance alone."""


@pytest.mark.parametrize("previous", [None, own_forward])
def test_it_has_the_face_of_the_forward_that_it_stands_for(previous):
    plain, model = Net(), Net()
    if previous is not None:
        plain.forward = model.forward = previous
    forward = gistkit.compress(model).forward
    assert inspect.signature(forward) == inspect.signature(plain.forward)
    assert typing.get_type_hints(forward) == typing.get_type_hints(plain.forward)
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        assert getattr(forward, name) == getattr(plain.forward, name)
    assert inspect.getsource(forward) == inspect.getsource(plain.forward)
    assert forward.__wrapped__ == (previous or types.MethodType(Net.forward, model))
    assert forward.__self__ is model
    assert inspect.signature(types.MethodType(forward.__func__, model)) == inspect.signature(plain.forward)
    assert forward.__func__.__doc__ == plain.forward.__doc__
    assert vars(forward).keys() <= set(functools.WRAPPER_ASSIGNMENTS)  # functools.wraps copies what is there


def bound(model):
    """As accelerate's mixed precision: the function wrapped, and bound to the model again."""
    function = model.forward.__func__

    @functools.wraps(function)
    def forward(*args, **kwargs):
        return function(*args, **kwargs)

    model.forward = types.MethodType(forward, model)


def partial(model):
    """As accelerate's hooks on modules."""
    old = model.forward
    model.forward = functools.update_wrapper(functools.partial(lambda _, *args, **kw: old(*args, **kw), model), old)


def unnamed_partial(model):
    model.forward = functools.partial(model.forward, half=False)


def closure(model):
    old = model.forward
    model.forward = lambda *args, **kwargs: old(*args, **kwargs)


@pytest.mark.parametrize("wrap", [partial, closure])
def test_wrappers_hide_nothing(wrap):
    model, plain = gistkit.compress(Net()), Net()
    plain.load_state_dict(model.state_dict())
    for m in (model, plain):
        wrap(m)
    with pytest.raises(CompressError, match="it is compressed already"):
        gistkit.compress(model)
    assert_same(plain, model, DATA)
    report = gistkit.report(model)
    assert report.stats.kept_bytes < report.stats.plain_bytes and report.notes == ()


@pytest.mark.parametrize("wrap", [bound, unnamed_partial])
def test_restore_takes_it_out_of_a_wrapper_and_compress_puts_it_back_there(wrap):
    model = gistkit.compress(Net())
    plain = copy.deepcopy(gistkit.restore(copy.deepcopy(model)))
    wrap(model)
    around = model.forward
    for _ in range(2):
        assert gistkit.restore(model) is model and model.forward == around
        with pytest.raises(CompressError, match="report: the model is not compressed"):
            gistkit.report(model)
        assert kept_by_gistkit(model) == []
        assert gistkit.compress(model) is model and model.forward == around
        with pytest.raises(CompressError, match="it is compressed already"):
            gistkit.compress(model)
    plain.load_state_dict(model.state_dict())
    assert_same(plain, model, DATA)
    assert gistkit.report(model).ratio > 1


def kept_by_gistkit(model):
    """The names of gistkit's own nodes behind a forward of the model."""
    return [n.name() for n in reachable([model(DATA[0][0])]) if n.name().startswith("_")]


def test_copies_of_a_wrapped_model_are_their_own():
    model = gistkit.compress(Net())
    bound(model)
    twin = copy.deepcopy(model)
    assert compressed_forward(twin) is not compressed_forward(model)
    twin(DATA[0][0]).sum().backward()
    assert gistkit.report(twin).stats is not None and gistkit.report(model).stats is None
    assert model.head.weight.grad is None is not twin.head.weight.grad
    with pytest.raises(pickle.PicklingError, match=r"Net\.forward stands around .* compressed .*unwrap_model"):
        pickle.dumps(model)
    model.forward = types.MethodType(compressed_forward(model).__func__, model)  # as accelerate's unwrap_model
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert compressed_forward(copied).model is copied and kept_by_gistkit(copied) != []
    assert vars(gistkit.restore(model)).keys() == vars(Net()).keys()
    bound(gistkit.compress(model))
    gistkit.restore(model)
    assert compressed_forward(copy.deepcopy(model)) is compressed_forward(pickle.loads(pickle.dumps(model))) is None


def test_a_replica_refuses():
    model = gistkit.compress(Net())
    with pytest.raises(CompressError, match=r"DataParallel: a replica .* cannot run.*DistributedDataParallel"):
        model._replicate_for_data_parallel()(DATA[0][0])
    want = model(DATA[0][0])
    assert torch.equal(gistkit.restore(model)._replicate_for_data_parallel()(DATA[0][0]).sum(), want.sum())


def test_data_parallel_without_devices_runs_and_with_several_is_refused():
    model = gistkit.compress(Net())
    plain = gistkit.restore(copy.deepcopy(model))
    parallel = nn.DataParallel(model)
    assert_same(plain, parallel.module, DATA)
    assert torch.equal(parallel(DATA[0][0]), plain(DATA[0][0])) and gistkit.report(model).ratio > 1
    gistkit.restore(model)
    parallel.device_ids = [0, 1]
    with pytest.raises(CompressError, match=r"DataParallel over devices \[0, 1\]; use .*DistributedDataParallel"):
        gistkit.compress(parallel)


def test_a_shallow_copy_refuses():
    model = gistkit.compress(Net())
    bound(model)
    shallow = copy.copy(model)
    assert shallow.head is model.head and compressed_forward(shallow) is None
    for copied in (shallow, copy.copy(shallow), copy.deepcopy(shallow), pickle.loads(pickle.dumps(shallow))):
        with pytest.raises(CompressError, match=r"copy\.copy: a shallow copy .* cannot run.*copy\.deepcopy"):
            copied(DATA[0][0])
    model(DATA[0][0])
    assert torch.equal(copy.copy(gistkit.restore(model)).eval()(DATA[0][0]), model(DATA[0][0]))


def test_a_plan_that_saves_too_little_is_not_carried_out():
    plain = Net()
    model = gistkit.compress(copy.deepcopy(plain), min_gain=0.9)
    assert_same(plain, model, DATA)
    assert any("the model's own forward runs, untouched" in note for note in gistkit.report(model).notes)
    assert gistkit.report(model).ratio == 1
