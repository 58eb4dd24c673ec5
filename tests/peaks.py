"""Training steps as a budget counts them, and their peaks of live bytes."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gistkit
from gistkit.plan.plan import Plan
from gistkit.runtime.inputs import spread
from gistkit.runtime.live import LiveBytes


def held_step(model: nn.Module, loss_fn: Callable, x: Any, y: Any) -> torch.Tensor:
    """Forward and backward, which plain loops hold the model's output during; the loss, detached."""
    args, kwargs = spread(x)
    out = model(*args, **kwargs)
    loss = loss_fn(out, y)
    loss.backward()
    return loss.detach()


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
