"""When each block of a step must be on the device: moDNN's task and data flow graph (DATE 2018, section II-2).

moDNN's tasks are the graph's tasks, its data blocks the graph's blocks. Weights and weight gradients always reside on
the device (II-2), and so does an input batch that outlives the step; under ``PLAN`` a weight gradient that is not
summed over sub-batches only from the task on that makes it. Everything else has *stays*: runs of tasks during which it
must be on the device; between two stays it may be in host memory. Two rules give the stays:

- ``PAPER``: a block stays for the tasks that read or make it, and may leave between any two of them: the paper's rule.
- ``PLAN``: what gistkit's runtime can carry out. A storage that backward saves leaves at most once, after its last
  forward reader, and then stays from its first use in backward to the last one. A block that autograd does not save,
  gradient maps among them, has no stash that could go to the host, so it stays on the device all its life; so does
  what covered operators keep for themselves: the maps of pools and dropouts, the statistics of batch norms.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from gistkit.ir import FORWARD, Block, SavedGraph, Task
from gistkit.planning.forms import kept_by_ops
from gistkit.planning.simulate import passing, sentinels

RESIDENT = ("weight", "buffer", "weight_gradient")
PAPER, PLAN = "paper", "plan"


@dataclass(frozen=True)
class Life:
    """One block that is not resident: its stays (first task, last task) in order, disjoint; dead after the last one.

    ``writes`` are the tasks that write to it. ``idle``: no forward task reads it after it was made, or it was there
    before the step. ``pinned``: a weight gradient, which from its first task on is there until the step ends.
    """

    block: int
    nbytes: int
    stays: tuple[tuple[int, int], ...]
    writes: tuple[int, ...]
    idle: bool
    pinned: bool = False

    def next_stay(self, task: int) -> int | None:
        """First task of the first stay that begins at or after a task; None where there is none."""
        at = bisect_left(self._starts, task)
        return self._starts[at] if at < len(self._starts) else None

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(first for first, _ in self.stays)

    @property
    def end(self) -> int:
        """The task after which the block is dead."""
        return self.stays[-1][1]


@dataclass(frozen=True)
class Lives:
    """The lives of a step under one rule; ``transient_bytes`` has an entry a task."""

    rule: str
    resident_bytes: int
    lives: dict[int, Life]
    transient_bytes: tuple[int, ...]

    @cached_property
    def needed(self) -> tuple[tuple[int, ...], ...]:
        """By task the blocks that must be there during it, I(t) and O(t); what is pinned only while it is written."""
        end = len(self.transient_bytes)
        found: list[list[int]] = [[] for _ in range(end)]
        for life in self.lives.values():
            for first, last in ((life.stays[0][0], life.writes[-1]),) if life.pinned else life.stays:
                for task in range(first, min(last, end - 1) + 1):
                    found[task].append(life.block)
        return tuple(map(tuple, found))

    @cached_property
    def pinned(self) -> frozenset[int]:
        """Blocks that stay where they are once they are made."""
        return frozenset(life.block for life in self.lives.values() if life.pinned)

    @cached_property
    def _needed_bytes(self) -> tuple[int, ...]:
        """By task the bytes of ``needed``, which has millions of entries in a step of thousands of tasks."""
        end = len(self.transient_bytes)
        steps = [0] * (end + 1)
        for life in self.lives.values():
            for first, last in life.stays:
                if first <= min(last, end - 1):
                    steps[first] += life.nbytes
                    steps[min(last, end - 1) + 1] -= life.nbytes
        return tuple(accumulate(steps[:end]))

    @cached_property
    def written(self) -> tuple[tuple[int, ...], ...]:
        """By task the blocks it needs and writes to."""
        return tuple(tuple(b for b in n if t in self.lives[b].writes) for t, n in enumerate(self.needed))

    @cached_property
    def ending(self) -> tuple[tuple[int, ...], ...]:
        """By task the blocks that are dead after it."""
        return tuple(tuple(b for b in n if self.lives[b].end == t) for t, n in enumerate(self.needed))

    @cached_property
    def starting(self) -> tuple[tuple[int, ...], ...]:
        """By task the blocks of which a stay begins with it, in order."""
        found: list[list[int]] = [[] for _ in self.needed]
        for block in sorted(self.lives):
            for first, _ in self.lives[block].stays:
                if first < len(found):
                    found[first].append(block)
        return tuple(map(tuple, found))

    def demand_bytes(self, task: int, workspace_bytes: int = 0) -> int:
        """Mmin(t, b) of eq. (1): inputs, output and workspace of a task, without the resident blocks.

        Under ``PLAN`` blocks that cannot leave count too. What the task's own operators make and free counts as
        workspace.
        """
        return self._needed_bytes[task] + self.transient_bytes[task] + workspace_bytes


def lives(
    graph: SavedGraph,
    rule: str = PLAN,
    *,
    inplace: Collection[int] = (),
    forms: Mapping[int, int] | None = None,
    link: bool = True,
    accumulates: bool = False,
) -> Lives:
    """The lives of a graph's blocks.

    ``inplace`` holds covered numbers of ReLUs that overwrite their input: that ends one task earlier, its memory is the
    output's. ``forms`` maps storages of which the runtime keeps a small form by itself to its bytes (0: nothing).
    Without a ``link`` to the host no block can leave: each has one stay. ``accumulates``: gradients are summed over
    sub-batches, and a task makes its weight gradient beside the sum (moDNN's adds to it; PyTorch's operators do not).
    """
    taken, forms, end = _overwritten(graph, inplace), forms or {}, len(graph.tasks)
    summed = rule == PAPER or accumulates
    readers, writers = _accesses(graph)
    own = set() if rule == PAPER else kept_by_ops(graph)
    made = {}
    for block in graph.blocks:
        if resident(graph, block, summed):
            continue
        small = forms.get(block.storage)
        seen = replace(block, uses=()) if small == 0 else block
        read = [t for t in readers[block.id] if small != 0 or graph.tasks[t].phase == FORWARD or t <= block.last]
        stays = (_paper if rule == PAPER else _plan)(seen, read, writers[block.id], end)
        if block.id in taken:
            stays = _cut(stays, taken[block.id])
        if stays and (small is not None or not link or block.storage in own):
            stays = ((stays[0][0], stays[-1][1]),)
        if stays and block.nbytes:
            idle = block.first < 0 or _idle(graph, block, read)
            pinned = block.kind == "weight_gradient" and stays[-1][1] >= end
            made[block.id] = Life(block.id, small or block.nbytes, stays, tuple(writers[block.id]), idle, pinned)
    resident_bytes = sum(b.nbytes for b in graph.blocks if resident(graph, b, summed))
    return Lives(rule, resident_bytes, made, _transient(graph, accumulates, inplace))


def resident(graph: SavedGraph, block: Block, summed: bool = True) -> bool:
    """Whether a block is on the device all the time; ``summed``: weight gradients that the step makes are."""
    if block.kind == "weight_gradient" and block.first >= 0 and not summed:
        return False
    return block.kind in RESIDENT or (block.kind == "input" and block.last >= len(graph.tasks))


def _transient(graph: SavedGraph, accumulates: bool, inplace: Collection[int]) -> tuple[int, ...]:
    found = [t.transient_bytes for t in graph.tasks]
    nans = ((i.first, i.last, i.nbytes) for i in sentinels(graph, inplace))
    for first, last, nbytes in (*(passing(graph) if accumulates else ()), *nans):
        for task in range(first, last + 1):
            found[task] += nbytes
    return tuple(found)


def _accesses(graph: SavedGraph) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Tasks that read and that write each block, in order; a saved block's uses are reads."""
    readers, writers = defaultdict(set), defaultdict(set)
    for task in graph.tasks:
        for block in task.reads:
            readers[block].add(task.index)
        for block in task.writes:
            writers[block].add(task.index)
    for block in graph.blocks:
        readers[block.id].update(use.task for use in block.uses)
        if block.first >= 0:
            writers[block.id].add(block.first)
    return defaultdict(list, {b: sorted(r) for b, r in readers.items()}), {
        b.id: sorted(writers[b.id]) for b in graph.blocks
    }


def _idle(graph: SavedGraph, block: Block, readers: list[int]) -> bool:
    """Whether backward needs the block and no forward task reads it after it was made."""
    forward = [t for t in readers if graph.tasks[t].phase == FORWARD]
    return block.saved >= 0 and (not forward or forward[-1] <= block.first)


def _paper(block: Block, readers: list[int], writers: list[int], end: int) -> tuple[tuple[int, int], ...]:
    if block.last >= end:
        return ((max(block.first, 0), end),)
    return tuple((t, t) for t in sorted({*readers, *writers}))


def _plan(block: Block, readers: list[int], writers: list[int], end: int) -> tuple[tuple[int, int], ...]:
    first, last = max(block.first, 0), block.last
    if not block.uses or last >= end:
        return ((first, max([first, last, *(u.task for u in block.uses)])),)
    held, use, final = max(last, block.saved, first), block.uses[0].task, block.uses[-1].task
    if block.storage < 0 or block.saved < 0 or use <= held + 1:
        return ((first, max(held, final)),)
    return ((first, held), (use, final))


def _cut(stays: tuple[tuple[int, int], ...], task: int) -> tuple[tuple[int, int], ...]:
    """Stays up to the task before the given one."""
    return tuple((first, min(last, task - 1)) for first, last in stays if first < task)


def _overwritten(graph: SavedGraph, inplace: Collection[int]) -> dict[int, int]:
    """Block -> forward task that overwrites it, for the inputs of in-place ReLUs."""
    covered = {c.index for c in graph.calls if c.covered in set(inplace) and c.covered >= 0}
    tasks: list[Task] = [t for t in graph.tasks if t.phase == "forward" and t.call in covered]
    return {block: t.index for t in tasks for block in t.reads if block not in t.writes}
