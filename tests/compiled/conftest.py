"""Of small networks all rebuilds are made, whatever time they take; test_time.py has the share of time."""

import pytest

from gistkit.compiled import partitioner


@pytest.fixture(autouse=True)
def all_rebuilds(monkeypatch):
    monkeypatch.setattr(partitioner, "TIME_SHARE", float("inf"))
