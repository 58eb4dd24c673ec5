"""For moDNN's tests: hand-made data and costs with no network behind them, small steps and budgets."""

from dataclasses import replace

from gistkit.planning.cost.algorithms import Algorithm
from gistkit.planning.cost.devices import PRESETS, Hardware
from gistkit.planning.cost.table import CostTable
from gistkit.planning.policies.modnn.sub_batch import TDFG, Data, Part, choose_sub_batch
from gistkit.planning.policies.registry import plain
from tests.support.step_graphs import chain, forked, pooled

FAST_LINK = replace(PRESETS["k40m"], name="fast link", launch_s=1e-7)
GRAPHS = {"chain": chain(8, 16, 32, 8), "pooled": pooled(16, 32, 8), "forked": forked(3, 16, 32, 8)}

SECOND_BYTES = 10**9
"""The hand-made link moves this in one second, in either direction."""
HAND_MADE = Hardware(
    name="hand-made",
    memory_bytes=2**40,
    memory_gbps=1000.0,
    d2h_gbps=SECOND_BYTES / 1e9,
    h2d_gbps=SECOND_BYTES / 1e9,
    both_gbps=2 * SECOND_BYTES / 1e9,
    flops={"float32": 1e12},
    launch_s=0.0,
    async_counts=True,
)


def data(block, nbytes, *stays, writes=None, fresh=True):
    """A block that stays during the given tasks: task numbers, or (first, last) pairs; made by the first."""
    pairs = tuple(s if isinstance(s, tuple) else (s, s) for s in stays)
    return Data(block, nbytes, pairs, tuple(writes or (pairs[0][0],)), fresh)


def part(seconds, *found, algorithms=None, resident=0, transient=None, size=1, parts=1):
    """A part of tasks that take the given seconds; algorithms: {task: ((name, seconds, workspace), ...)} instead."""
    known = [tuple(Algorithm(*a) for a in (algorithms or {}).get(t, (("", s, 0),))) for t, s in enumerate(seconds)]
    tdfg = TDFG(resident, found, tuple(transient or [0] * len(seconds)))
    return Part(parts, size, tdfg, CostTable(HAND_MADE, tuple(known), {}))


def least_bytes(graph, costs, rule=None, batch_norm=False):
    """The least budget of each class of moves."""
    return choose_sub_batch(graph, costs, 2**62, rule=rule, batch_norm=batch_norm)[1]


def budget_between(graph, costs, share, rule=None, fidelity="reassociated"):
    """A budget between the least and plain PyTorch's peak, sub-batches of batch norms accepted."""
    least = least_bytes(graph, costs, rule, batch_norm=True)[fidelity]
    return least + int(share * max(0, plain(graph, costs).peak_bytes - least))
