"""Where the forward is cut between segments that may run again: networks of which several feature maps cross."""

import copy

import pytest
import torch
from torch import nn

import gistkit
from gistkit.planning.policies.checkpoint import cuts


class UNet(nn.Module):
    """Eight blocks, the results of the first four of which the others read again, the last first."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(self._block(3 if i == 0 else 8) for i in range(4))
        self.up = nn.ModuleList(self._block(16) for _ in range(4))

    def _block(self, inputs):
        layers = (nn.Conv2d(inputs, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        return nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())

    def forward(self, x):
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for block in self.up:
            x = block(torch.cat((x, skips.pop()), 1))
        return x.mean()


class TwoStreams(nn.Module):
    """Six blocks, each of which changes both of two maps."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(nn.ModuleList((nn.Linear(8, 64), nn.Linear(64, 8))) for _ in range(12))

    def forward(self, x):
        y = x.square() * self.inner[0][0].weight[0]
        x = x * self.inner[1][0].weight[0]
        for one, two in zip(self.inner[::2], self.inner[1::2], strict=True):
            joint = (x + y).sigmoid()
            x, y = (s + w[1](nn.functional.gelu(w[0](s * joint))) for s, w in ((x, one), (y, two)))
        return (x + y).mean()


NETWORKS = {"unet": (UNet, (4, 3, 32, 32), "45%"), "two streams": (TwoStreams, (512, 8), "60%")}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_with_skips_or_two_streams_are_cut_and_run_again_bit_for_bit(name):
    make, shape, budget = NETWORKS[name]
    torch.manual_seed(0)
    model, batch = make(), torch.randn(shape)
    plain = copy.deepcopy(model)
    plan = gistkit.plan(model, batch, budget=budget, hardware="cpu")
    compressed = gistkit.compress(model, plan)
    for _ in range(2):
        with gistkit.LiveBytes() as live:
            live.track(model, batch)
            compressed(batch).backward()
        plain(batch).backward()
        assert live.peak_bytes <= plan.budget_bytes
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
        plain.zero_grad()
        model.zero_grad()


class Blocks(nn.Module):
    """Twelve of them, each of which widens what it has made of its input, and adds the input."""

    def __init__(self):
        super().__init__()
        layers = lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))  # noqa: E731
        self.inner = nn.ModuleList(layers() for _ in range(12))

    def forward(self, x):
        for inner in self.inner:
            x = x + inner(x).sigmoid()
        return x.mean()


def test_where_one_map_crosses_often_no_place_between_is_taken():
    graph = gistkit.capture(Blocks(), (torch.randn(512, 8),), backward=True)
    found = cuts(graph)
    assert len(found) >= 12 and {len(cut.blocks) for cut in found} == {1}
