"""Convolutions that take both gradients at once where later calls have let go of as much: no higher peak."""

import torch
from torch import nn

import gistkit
from gistkit.capture.nodes import reachable
from gistkit.runtime.forward import state
from gistkit.runtime.live import LiveBytes
from tests.support.nn_cases import same_bits

WIDTH, DEPTH = 8, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in range(2))

    def forward(self, x):
        y = torch.relu(self.norms[0](self.a(x)))
        return torch.relu(self.norms[1](self.b(y)) + x)


def network():
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU())
    return nn.Sequential(stem, *(Block() for _ in range(DEPTH)))


def image(batch=4):
    return torch.randn(batch, 3, 24, 24, generator=torch.Generator().manual_seed(1))


def step(model, x):
    """(peak, names of the convolutions' nodes, gradients) of the third step."""
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        with LiveBytes(timeline=False) as live:
            loss = model(x).square().sum()
            names = [node.name() for node in reachable([loss])]
            loss.backward()
            del loss
    return live.peak_bytes, names, [p.grad for p in model.parameters()]


def test_pytorchs_nodes_raise_no_peak_where_there_is_room(monkeypatch):
    monkeypatch.setattr(state, "JOINT_BYTES", 0)
    joint, fewer, grads = step(gistkit.compress(network()), image())
    monkeypatch.setattr(state.ForwardState, "has_room", lambda *_: False)
    apart, own, wanted = step(gistkit.compress(network()), image())
    assert own.count("_Conv2dBackward") == 2 * DEPTH and 0 < fewer.count("_Conv2dBackward") <= DEPTH
    assert all(map(same_bits, grads, wanted)) and joint <= apart
