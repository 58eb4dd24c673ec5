"""Segments that run anew: what lives how long, graphs run twice, threads, exceptions."""

import copy
import gc
import threading

import pytest
import torch
import torch.nn.functional as F

import gistkit
from gistkit.runtime.live import LiveBytes
from tests.support.recompute_cases import chain, planned
from tests.support.training import batches


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
