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


class Scaled(torch.nn.Module):
    """Multiplies by a number that a loop may change, which a rerun must take from its own forward."""

    def __init__(self):
        super().__init__()
        self.chain, self.factor = chain(), 1.0
        self.chain.blocks[1].register_module("scale", torch.nn.Identity())

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
