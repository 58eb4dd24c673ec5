"""Training steps as a budget counts them, their peaks of live bytes, and what is predicted of these."""

import copy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import gistkit
from gistkit.api.capturing import step_on
from gistkit.capture.batch import spread
from gistkit.ir.plan import Plan
from gistkit.planning import choose
from gistkit.planning.cost.table import cost_table
from gistkit.planning.simulate.simulator import Simulator, memory_bytes
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
        with LiveBytes(timeline=False) as live:
            live.track(model, *tree_leaves(held))
            step()
        peaks.append(live.peak_bytes)
    return peaks


def peaks_of(model: nn.Module, plan: Plan, x: torch.Tensor) -> list[int]:
    """The peaks of two steps of a copy of the model, whose output is its loss."""
    twin = gistkit.compress(copy.deepcopy(model), plan)
    return peaks_of_steps(twin, lambda: twin(x).backward(), x)


def densities_of(model: nn.Module, x: torch.Tensor) -> dict[int, float]:
    """Those of a recorded step, by storage."""
    recorded = gistkit.capture(copy.deepcopy(model), (x,), fake=False)
    return {s.id: s.density for s in recorded.storages if s.density is not None}


def least_plan(model: nn.Module, *batch: Any, **asked: Any) -> Plan:
    """The plan for the least budget of its class."""
    return gistkit.plan(model, *batch, budget=least_bytes(model, *batch, **asked), **asked)


def least_bytes(model: nn.Module, *batch: Any, **asked: Any) -> int:
    """The least budget that a refused plan names for the class of moves asked for. What the other classes need, which
    takes most of a refusal's time, is not searched for."""
    unknown = SimpleNamespace(peak_bytes=sys.maxsize)
    with pytest.raises(gistkit.BudgetError) as refused, pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "minimise_peak", lambda *_, **__: unknown)
        gistkit.plan(model, *batch, budget=1, **asked)
    return refused.value.least_bytes["lossy" if "lossy" in asked else asked.get("fidelity", "bitwise")]


def steady_peak_bytes(graph, plan, costs):
    """What a plan is predicted to hold in every step but the first, whose comparing is all the CPU's scratch."""
    assert not costs.hardware.async_counts
    composed = Simulator(graph, costs).profile(plan)
    return max(memory_bytes([i for i in composed.intervals if i.what != "scratch"], composed.tasks))


def unchecked_peak(plan, model, *batch, loss_fn=None, density=None):
    """That peak of the plan's step on the CPU, of a model on a batch."""
    graph, device = step_on("unchecked_peak", model, batch, loss_fn, "cpu")
    return steady_peak_bytes(graph, plan, cost_table(graph, device, density=density))
