"""Segments that run anew: what lives how long, graphs run twice, threads, exceptions."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F

import gistkit
from tests.support.recompute_cases import chain, planned
from tests.support.training import batches


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
