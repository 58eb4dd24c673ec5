"""accelerate: models that are compressed before and after ``prepare``, with and without its mixed precision."""

import copy
import pickle

import pytest
import torch

import gistkit
from gistkit.errors import CompressError
from tests.integrations.cases import BATCHES, assert_same, network


@pytest.fixture(params=["no", "bf16"])
def accelerator(request):
    accelerate = pytest.importorskip("accelerate")  # here, and not where tests are collected: it takes seconds
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(cpu=True, mixed_precision=request.param, gradient_accumulation_steps=2)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def prepared(accelerator, compressed=""):
    model = network()
    if compressed == "before":
        gistkit.compress(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    return gistkit.compress(model) if compressed == "after" else model, optimizer


def train(accelerator, model, optimizer):
    losses = []
    for _ in range(2):
        for images, labels in BATCHES:
            with accelerator.accumulate(model):
                out = model(images, labels)
                accelerator.backward(out["loss"])
                optimizer.step()
                optimizer.zero_grad()
            assert out["logits"].dtype == torch.float32
            losses.append(out["loss"].detach())
    return losses, {name: t.clone() for name, t in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("when", ["before", "after"])
def test_trains_to_the_same_bits(accelerator, when):
    model, optimizer = prepared(accelerator, when)
    with pytest.raises(CompressError, match="compressed already"):
        gistkit.compress(model)
    assert_same(train(accelerator, *prepared(accelerator)), train(accelerator, model, optimizer))
    report = gistkit.report(model)
    assert report.ratio > 1.5 and report.notes == ()


def test_what_is_restored_trains_as_plain_and_is_compressed_again_where_it_was(accelerator):
    model, optimizer = prepared(accelerator, "before")
    around = model.forward
    gistkit.restore(model)
    with pytest.raises(CompressError, match="not compressed"):
        gistkit.report(model)
    assert_same(train(accelerator, *prepared(accelerator)), train(accelerator, model, optimizer))
    assert gistkit.compress(model).forward == around or accelerator.mixed_precision == "no"
    model(*BATCHES[0])
    assert gistkit.report(model).ratio > 1.5


def test_unwrapped_it_is_compressed_still_and_restored_it_is_as_it_was(accelerator):
    model, _ = prepared(accelerator, "before")
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        assert gistkit.report(model).stats is None
        copied(*BATCHES[0])["loss"].backward()
        assert gistkit.report(copied).ratio > 1.5
    plain = accelerator.unwrap_model(prepared(accelerator)[0], keep_fp32_wrapper=False)
    plain.__dict__.pop("forward", None)  # the bound method of the class, which accelerate leaves behind
    assert vars(gistkit.restore(model)).keys() == vars(plain).keys()
