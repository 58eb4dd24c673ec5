"""Training steps as a budget counts them, and their peaks of live bytes."""

import copy
import gc
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import gistkit
from gistkit.capture.batch import spread
from gistkit.ir.plan import Plan
from gistkit.planning import refusal
from gistkit.runtime.live import LiveBytes


def held_step(model: nn.Module, loss_fn: Callable, x: Any, y: Any) -> torch.Tensor:
    """Forward and backward, which plain loops hold the model's output during; the loss, detached."""
    args, kwargs = spread(x)
    out = model(*args, **kwargs)
    loss = loss_fn(out, y)
    loss.backward()
    return loss.detach()


def peaks_of_steps(model: nn.Module, step: Callable[[], Any], *held: Any) -> list[int]:
    """The peaks of two steps from no gradients; all tensors of the model and of ``held`` count."""
    peaks = []
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        gc.collect()
        with LiveBytes(timeline=False) as live:
            live.track(model, *tree_leaves(held))
            step()
        peaks.append(live.peak_bytes)
    return peaks


def peaks_of(model: nn.Module, plan: Plan, x: torch.Tensor) -> list[int]:
    """The peaks of two steps of a copy of the model, whose output is its loss."""
    twin = gistkit.compress(copy.deepcopy(model), plan)
    return peaks_of_steps(twin, lambda: twin(x).backward(), x)


def least_plan(model: nn.Module, *batch: Any, **asked: Any) -> Plan:
    """The plan for the least budget of its class."""
    return gistkit.plan(model, *batch, budget=least_bytes(model, *batch, **asked), **asked)


def least_bytes(model: nn.Module, *batch: Any, **asked: Any) -> int:
    """The least budget that a refused plan names for the class of moves asked for. What the other classes need, which
    takes most of a refusal's time, is not searched for."""
    unknown = SimpleNamespace(peak_bytes=sys.maxsize)
    with pytest.raises(gistkit.BudgetError) as refused, pytest.MonkeyPatch.context() as patch:
        patch.setattr(refusal, "minimise_peak", lambda *_, **__: unknown)
        gistkit.plan(model, *batch, budget=1, **asked)
    return refused.value.least_bytes["lossy" if "lossy" in asked else asked.get("fidelity", "bitwise")]
