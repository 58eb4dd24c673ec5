"""For moDNN's tests: hand-made lives, costs and parts with no network behind them, small steps and budgets."""

from dataclasses import replace

from gistkit.planning.cost.algorithms import Algorithm
from gistkit.planning.cost.devices import PRESETS, Hardware
from gistkit.planning.cost.table import CostTable
from gistkit.planning.policies.modnn.bounds import Part
from gistkit.planning.policies.modnn.lives import PAPER, PLAN, Life, Lives
from gistkit.planning.policies.modnn.parts import least_bytes
from gistkit.planning.policies.plain import plain
from tests.support.step_graphs import chain, forked, pooled

FAST_LINK = replace(PRESETS["k40m"], name="fast link", launch_s=1e-7)
GRAPHS = {"chain": chain(8, 16, 32, 8), "pooled": pooled(16, 32, 8), "forked": forked(3, 16, 32, 8)}

SECOND_BYTES = 10**9
"""The hand-made link moves this in one second, in either direction."""


def link(launch_s=0.0):
    """A device whose link moves SECOND_BYTES a second."""
    return Hardware(
        name="hand-made",
        memory_bytes=2**40,
        memory_gbps=1000.0,
        d2h_gbps=SECOND_BYTES / 1e9,
        h2d_gbps=SECOND_BYTES / 1e9,
        both_gbps=2 * SECOND_BYTES / 1e9,
        flops={"float32": 1e12},
        launch_s=launch_s,
        async_counts=True,
    )


def costs(seconds, algorithms=None):
    """Costs of tasks that take the given seconds; algorithms: {task: ((name, seconds, workspace), ...)} instead."""
    algorithms = algorithms or {}
    known = [tuple(Algorithm(*a) for a in algorithms.get(t, (("", s, 0),))) for t, s in enumerate(seconds)]
    return CostTable(link(), tuple(known), {})


def life(block, nbytes, *stays, writes=None, idle=False):
    """A block that stays during the given tasks: task numbers, or (first, last) pairs; made by the first."""
    pairs = tuple(s if isinstance(s, tuple) else (s, s) for s in stays)
    return Life(block, nbytes, pairs, tuple(writes or (pairs[0][0],)), idle)


def lives(tasks, *found, resident=0, transient=None, rule=PAPER):
    """Lives over so many tasks."""
    return Lives(rule, resident, {one.block: one for one in found}, tuple(transient or [0] * tasks))


def part(alive, table, size=1, parts=1):
    """A part of a step."""
    return Part(parts, size, alive, table)


def budget_between(graph, costs, share, rule=PLAN, fidelity="reassociated"):
    """A budget between the least and plain PyTorch's peak, sub-batches of batch norms accepted."""
    least = least_bytes(graph, costs, rule, batch_norm=True)[fidelity]
    return least + int(share * max(0, plain(graph, costs).peak_bytes - least))
