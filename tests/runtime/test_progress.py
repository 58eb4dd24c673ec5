"""Whoever waits for a first step is told why, once; nobody else hears anything."""

import logging
import time

import torch

import gistkit
from gistkit.runtime.announced import announced


def test_a_long_block_is_announced_once(caplog):
    with caplog.at_level(logging.WARNING, logger="gistkit"), announced("first step of Net", after_s=0.01):
        deadline = time.monotonic() + 10
        while not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.01)
    assert caplog.messages == ["first step of Net: more than 0.01 s so far"]


def test_only_first_steps_are_watched(monkeypatch):
    seen = []
    monkeypatch.setattr("threading.Timer.start", lambda timer: seen.append(timer.args))
    model = gistkit.compress(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()))
    for _ in range(3):
        model(torch.randn(2, 3, 16, 16)).sum().backward()
    assert [what for _, what, _ in seen] == ["gistkit captures, plans and checks the first step of Sequential"]
