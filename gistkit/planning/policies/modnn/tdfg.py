"""moDNN's task and data flow graph (Chen et al., DATE 2018, section II-2): when each data block must be on the device.

Tasks are those of the captured step. Weights always reside on the device, and so does an input batch that outlives the
step. Every other data block has *stays*: runs of tasks during which it must be on the device. Between two stays it may
be in host memory.

- :func:`paper_tdfg` is the paper's rule: a block stays for each task that reads or writes it; weight gradients reside.
- :func:`plan_tdfg` is what gistkit's runtime can run: all memory of the step as the simulator has it, of which a block
  that autograd saves may leave once, after its last forward task, and stays from its first use in backward to the last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from gistkit.ir import BACKWARD, SavedGraph
from gistkit.planning.simulate import Interval


@dataclass(frozen=True)
class Data:
    """One data block: its stays (first task, last task) in order, and the tasks that write it. ``fresh``: criterion (b)
    keeps it on the device from its making to its next stay."""

    block: int
    nbytes: int
    stays: tuple[tuple[int, int], ...]
    writes: tuple[int, ...] = ()
    fresh: bool = False


@dataclass(frozen=True)
class TDFG:
    """The data of a step by number, the bytes that always reside, and by task what its operators make and free."""

    resident_bytes: int
    data: tuple[Data, ...]
    transient_bytes: tuple[int, ...]

    @cached_property
    def starting(self) -> dict[int, list[int]]:
        """By task the data of which a stay begins with it: those of its I(t) and O(t) that may be missing."""
        return _by_key((first, number) for number, d in enumerate(self.data) for first, _ in d.stays)

    @cached_property
    def ending(self) -> dict[int, list[int]]:
        """By task the data of which a stay ends with it."""
        return _by_key((last, number) for number, d in enumerate(self.data) for _, last in d.stays)

    @cached_property
    def written(self) -> dict[int, list[int]]:
        """By task the data that it writes."""
        return _by_key((task, number) for number, d in enumerate(self.data) for task in d.writes)

    @cached_property
    def demand_bytes(self) -> tuple[int, ...]:
        """By task Mmin(t, b) of eq. (1) without workspace: inputs, output, and what its operators make and free."""
        change = [0] * (len(self.transient_bytes) + 2)
        for data in self.data:
            for first, last in data.stays:
                change[first] += data.nbytes
                change[last + 1] -= data.nbytes
        return tuple(map(sum, zip(self.transient_bytes, accumulate(change), strict=False)))


def paper_tdfg(graph: SavedGraph, libraries_bytes: int = 0) -> TDFG:
    """The paper's rule; ``libraries_bytes`` reside as well. A block that only backward reads again is not kept by
    criterion (b), which else would keep it until then."""
    end, resident_bytes, data = len(graph.tasks), libraries_bytes, []
    written = _written(graph)
    used = _by_key((b, t.index) for t in graph.tasks for b in (*t.reads, *t.writes))
    for block in graph.blocks:
        tasks = sorted({*used[block.id], *written[block.id], *(use.task for use in block.uses)})
        if block.kind in ("weight", "buffer", "weight_gradient") or (block.kind == "input" and block.last >= end):
            resident_bytes += block.nbytes
        elif block.nbytes and (tasks or block.last >= end):
            stays = ((max(block.first, 0), end),) if block.last >= end else tuple((t, t) for t in tasks)
            again = next((graph.tasks[t].phase for t in tasks if t > block.first), "")
            fresh = block.first >= 0 and (block.saved < 0 or again != BACKWARD)
            data.append(Data(block.id, block.nbytes, stays, tuple(written[block.id]), fresh))
    return TDFG(resident_bytes, tuple(data), tuple(t.transient_bytes for t in graph.tasks))


def plan_tdfg(graph: SavedGraph, intervals: Iterable[Interval], movable: Collection[int]) -> TDFG:
    """gistkit's rule: ``intervals`` are all that the step holds if nothing leaves; blocks in ``movable`` may leave
    between their forward and their backward tasks."""
    end, resident_bytes, data = len(graph.tasks), 0, []
    transient, written = [0] * end, _written(graph)
    for interval in sorted((i for i in intervals if i.what != "workspace"), key=lambda i: i.block):
        first, last = max(interval.first, 0), min(interval.last, end)
        if interval.first < 0 and last == end:
            resident_bytes += interval.nbytes
        elif interval.block < 0 or interval.what == "scratch":
            for task in range(first, min(last, end - 1) + 1):
                transient[task] += interval.nbytes
        else:
            block, stays = graph.blocks[interval.block], ((first, last),)
            if block.id in movable:
                held, use = max(block.last, block.saved, first), block.uses[0].task
                stays = ((first, held), (use, last)) if use > held + 1 else stays
            data.append(Data(block.id, interval.nbytes, stays, tuple(written[block.id])))
    return TDFG(resident_bytes, tuple(data), tuple(transient))


def _written(graph: SavedGraph) -> dict[int, list[int]]:
    """By block the tasks that make or write it."""
    made = [(b.id, b.first) for b in graph.blocks if b.first >= 0]
    return _by_key([*made, *((block, t.index) for t in graph.tasks for block in t.writes)])


def _by_key(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found
