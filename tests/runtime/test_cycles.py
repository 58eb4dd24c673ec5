"""Nothing of a step waits for the garbage collector: its memory goes when its last reader has gone."""

import gc
import weakref

import pytest
import torch
from torch import nn

import gistkit
from gistkit.runtime import engine
from gistkit.runtime.live import LiveBytes

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in range(2))

    def forward(self, x):
        return torch.relu(self.norms[1](self.b(torch.relu(self.norms[0](self.a(x))))) + x)


def network():
    torch.manual_seed(0)
    stem = nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.MaxPool2d(2)
    model = nn.Sequential(*stem, Block(), nn.Dropout(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(WIDTH * 16, 10))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model


def images():
    return torch.randn(8, 3, 16, 16)


def compressed(how):
    model = network()
    if how is None:
        return gistkit.compress(model)
    plain = gistkit.plan(model, images(), policy="plain")
    budget = round(0.9 * plain.peak_bytes) if how == "checkpoint within a budget" else None
    plan = gistkit.plan(model, images(), policy=how.split()[0], budget=budget)
    assert "recompute" in {d.codec for d in plan.decisions}
    return gistkit.compress(model, plan)


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("how", [None, "checkpoint", "checkpoint within a budget"])
def test_steps_leave_nothing_to_the_collector(monkeypatch, no_collector, how):
    model, regions = compressed(how), []

    class Watched(engine.ForwardState):
        def __post_init__(self):
            super().__post_init__()
            regions.append(weakref.ref(self))

    monkeypatch.setattr(engine, "ForwardState", Watched)
    with LiveBytes(timeline=False) as live:
        for _ in range(3):
            loss = model(images()).square().sum()
            loss.backward()
            del loss
            assert live.current_bytes == 0
        model(images())
        assert live.current_bytes == 0, "a forward whose result nobody wants"
    assert len(regions) == 4 and not any(ref() is not None for ref in regions)
