"""A budget kept on a CUDA device where data have fewer zeros than planned, by the allocator's own peak."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic_cudnn")]

BATCH, SIZE, WIDTH, LAYERS = 32, 64, 64, 17


def chain(bias):
    """ReLUs between convolutions; the higher the bias, the more they let pass. 32 MiB an activation."""
    torch.manual_seed(0)
    layers = []
    for i in range(LAYERS):
        layers += [nn.Conv2d(3 if i == 0 else WIDTH, WIDTH, 3, padding=1), nn.ReLU()]
        nn.init.constant_(layers[-2].bias, bias)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10)).cuda()


def gradients(model, x, y):
    """(loss and gradients on the host, the allocator's peak)."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    loss = gistkit.step(model, F.cross_entropy, x, y)
    torch.cuda.synchronize()
    peak_bytes = torch.cuda.max_memory_allocated()
    found = [loss.cpu(), *(p.grad.cpu() for p in model.parameters())]
    model.zero_grad(set_to_none=True)
    return found, peak_bytes


@pytest.mark.parametrize("room_bytes", [0, 40 * 2**20])
def test_the_allocators_peak_keeps_the_budget_and_every_bit(room_bytes):
    model = chain(0.5)
    x, y = torch.randn(BATCH, 3, SIZE, SIZE, device="cuda"), torch.arange(BATCH, device="cuda") % 10
    want, plain_bytes = gradients(model, x, y)
    words = {"loss_fn": F.cross_entropy, "policy": "gist", "density": 0.2}
    peak_bytes = gistkit.plan(model, x, y, **words).peak_bytes
    plan = gistkit.plan(model, x, y, budget=peak_bytes + room_bytes, **words)
    assert plan.budget_bytes < plain_bytes
    small = gistkit.compress(model, plan)
    with pytest.warns(gistkit.BudgetWarning, match="the step takes longer") as told:
        found, first_bytes = gradients(small, x, y)
    assert sum(issubclass(w.category, gistkit.BudgetWarning) for w in told) == 1
    report = gistkit.report(small).budget
    again, second_bytes = gradients(small, x, y)  # a second warning would be an error
    assert report.moved and report.excess_bytes > room_bytes
    assert max(first_bytes, second_bytes) <= plan.budget_bytes
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(again, want, strict=True))
    print(f"\nroom {room_bytes}: budget {plan.budget_bytes}, peaks {first_bytes}, {second_bytes}, plain {plain_bytes}")
