"""What `optimal` decides is what the runtime carries out: storages that ops keep for themselves stay with their ops."""

import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.planning.cost.devices import hardware
from gistkit.planning.forms.allowed import SMALL_BYTES, kept_by_ops
from tests.support.training import batches, train

WIDTH = SMALL_BYTES // 4
"""Channels from which on a batch norm's statistics are worth a move by their size."""
H200 = replace(hardware("h200"), libraries_bytes=0)  # far more than these networks need
SLOW = replace(H200, d2h_gbps=0.5, h2d_gbps=0.5, both_gbps=0.5)
"""Running anew is faster than this link."""


class Wide(nn.Module):
    """Depthwise convolutions with batch norms of 1024 channels, a pool and a dropout behind them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, stride=2, padding=1, bias=False)
        conv = lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH, bias=False)  # noqa: E731
        self.parts = nn.Sequential(*(nn.Sequential(conv(), nn.BatchNorm2d(WIDTH), nn.ReLU()) for _ in range(4)))
        self.pool, self.dropout, self.head = nn.MaxPool2d(2), nn.Dropout(0.5), nn.Linear(WIDTH, 10)

    def forward(self, x):
        return self.head(self.dropout(self.pool(self.parts(self.stem(x))).flatten(1)))


def wide():
    torch.manual_seed(0)
    return Wide(), batches(2, 32, 4)


def test_a_plan_with_wide_batch_norms_is_carried_out_to_the_bit():
    model, data = wide()
    plan = gistkit.plan(model, *data[0], loss_fn=F.cross_entropy, budget="55%", hardware=SLOW)
    own = kept_by_ops(gistkit.capture(model, data[0][:1], on_cpu=True))
    moved = {d.codec for d in plan.decisions if d.storage in own and (d.codec, d.place) != ("dense", "device")}
    assert moved <= {"argmax4", "bits"}
    assert "recompute" in {d.codec for d in plan.decisions}
    plain, twin = train(copy.deepcopy(model), data), train(gistkit.compress(model, plan), data)
    assert torch.equal(torch.stack(plain.losses), torch.stack(twin.losses))
    assert all(torch.equal(plain.grads[name], twin.grads[name]) for name in plain.grads)
    assert all(torch.equal(plain.state[name], twin.state[name]) for name in plain.state)
