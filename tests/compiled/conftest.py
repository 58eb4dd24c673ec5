"""Of small networks all rebuilds are made, whatever time they take; test_time.py has the share of time."""

import pytest
import torch
from torch._dynamo.utils import counters

from gistkit.compiled import partitioner
from gistkit.compiled.rebuilds import rounding


@pytest.fixture(autouse=True)
def all_rebuilds(monkeypatch):
    for fidelity in partitioner.SHARES:
        monkeypatch.setitem(partitioner.SHARES, fidelity, (float("inf"),))


@pytest.fixture
def fresh():
    """Nothing is compiled yet, and nothing stays."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(rounding, "rounds_within_kernels", lambda pair: True)
