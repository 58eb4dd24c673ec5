"""Peaks of live bytes of training steps under a plan."""

import copy
import gc

import torch
from torch import nn

import gistkit
from gistkit.plan.plan import Plan
from gistkit.runtime.live import LiveBytes


def peaks_of(model: nn.Module, plan: Plan, x: torch.Tensor) -> list[int]:
    """The peaks of two steps of a copy of the model, whose output is its loss."""
    twin, peaks = gistkit.compress(copy.deepcopy(model), plan), []
    for _ in range(2):
        twin.zero_grad(set_to_none=True)
        gc.collect()
        with LiveBytes(timeline=False) as live:
            live.track(twin, x)
            twin(x).backward()
        peaks.append(live.peak_bytes)
    return peaks
