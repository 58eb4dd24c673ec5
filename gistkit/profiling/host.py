"""What the host takes for a task of a step, measured.

A machine's cores are shared with others. On one H200's a loop of 200,000 additions took 6.8 to 14 ms,
a kernel's launch 7 to 12 us, the host of one plan's step, 13,941 calls, 27 to 54 ms. So each timing stands beside such
a loop, and counts as at the pace of the quickest of them; of what is left the median, as a step that the host bounds
takes what most of them take.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from gistkit.capture import capture
from gistkit.ir import SavedGraph
from gistkit.planning import with_joint_gradients
from gistkit.planning.cost import PRESETS, cost_table
from gistkit.planning.policies import POLICIES
from gistkit.planning.simulate import Simulator
from gistkit.runtime import compress, restore

BLOCKS = 10
"""Of the network that the host is timed on by a calibration."""
STEPS, REPEATS, ADDITIONS = 2, 5, 50_000
"""Steps in one timing, timings behind a warm-up, and additions in the loop that shows the core's pace."""


class Timing(NamedTuple):
    """Seconds of one step, and of the loop beside it."""

    seconds: float
    loop_s: float


def loop_s() -> float:
    """Seconds of a loop of Python."""
    begun, total = time.perf_counter(), 0
    for number in range(ADDITIONS):
        total += number
    return time.perf_counter() - begun


def timings(step: Callable[[], Any], device: torch.device) -> list[Timing]:
    """Timings of a step, with the device's work. Synchronises."""
    drain = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    found = []
    for _ in range(REPEATS + 1):
        drain()
        before, begun = loop_s(), time.perf_counter()
        for _ in range(STEPS):
            step()
        drain()
        taken_s = (time.perf_counter() - begun) / STEPS
        found.append(Timing(taken_s, (before + loop_s()) / 2))
    return found[1:]


def at_one_pace(found: Sequence[Sequence[Timing]]) -> list[float]:
    """The median seconds of each of several steps' timings, as if the core had always had the quickest loop's pace."""
    least_s = min(timing.loop_s for several in found for timing in several)
    return [statistics.median(t.seconds * least_s / t.loop_s for t in several) for several in found]


class HostTimes(NamedTuple):
    """The host's figures of :class:`Hardware`."""

    host_s: float = 0.0
    runtime_host_s: float = 0.0
    move_host_factor: float = 1.0
    form_host_factor: float = 0.0


def host_task_s(device: torch.device) -> HostTimes:
    """What the host takes for one task of a step, of a small network whose kernels take less time than the host takes
    to launch them. Synchronises."""
    model, x = small_step(device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autograd.set_multithreading_enabled(False):  # as gistkit.step
            model(x).sum().backward()

    return task_s_of(model, capture(model, (x,), backward=True), step, device)


def task_s_of(model: nn.Module, graph: SavedGraph, step: Callable[[], Any], device: torch.device) -> HostTimes:
    """The same of a model's step, which ``graph`` was captured of; the model is compressed then. The runtime carries
    out a plan of no decision, then `checkpoint` and `gist`: what these take longer is for the tasks that the one runs
    anew and the storages that the other encodes or rebuilds."""
    # any device would do: the plans are those of least peak and of Gist's rules; a second of the host a task, a rerun
    # and a form: their sum counts them
    costs = cost_table(graph, replace(PRESETS["h200"], runtime_host_s=1.0, move_host_factor=1.0, form_host_factor=1.0))
    moves = [POLICIES[name](graph, costs) for name in ("checkpoint", "gist")]
    taken = [timings(step, device)]
    for plan in (replace(moves[0], decisions=()), *moves):
        compress(model, with_joint_gradients(graph, costs, plan))
        taken.append(timings(step, device))
        restore(model)
    plain_s, bare_s, *moved_s = (s / len(graph.tasks) for s in at_one_pace(taken))
    simulator, factors = Simulator(graph, costs), []
    for plan, task_s in zip(moves, moved_s, strict=True):
        added = float(simulator.profile(plan).beside.host_s.sum()) / len(graph.tasks) - 1
        factors.append((task_s - bare_s) / bare_s / added if added else 0.0)
    rerun, form = factors
    return HostTimes(rounded(plain_s), rounded(bare_s), rounded(max(1.0, rerun)), rounded(max(0.0, form)))


def small_step(device: torch.device) -> tuple[nn.Sequential, torch.Tensor]:
    """The network that the host is timed on, and its input: convolutions, batch norms and ReLUs over 4 KiB."""
    layers = (m for _ in range(BLOCKS) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()))
    with device:  # whatever default device the caller has set
        model = nn.Sequential(*layers).train()
    return model, torch.zeros(2, 8, 8, 8, device=device)


def rounded(value: float) -> float:
    """Four digits: no more is reproducible."""
    return float(f"{value:.4g}")
