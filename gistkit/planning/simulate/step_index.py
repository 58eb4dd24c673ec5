"""Look-ups over a captured step: what follows from the graph alone."""

from __future__ import annotations

from collections import defaultdict

from gistkit.errors import PlanError
from gistkit.ir import BACKWARD, FORWARD, Block, SavedGraph, by_key


class StepIndex:
    """A step's tasks and blocks by what asks for them. Raises PlanError for a graph without tasks."""

    def __init__(self, graph: SavedGraph) -> None:
        if not graph.tasks:
            raise PlanError("graph must hold the tasks of a whole step, got one without; capture it with backward=True")
        self.graph = graph
        self.covered = {c.covered: c for c in graph.calls if c.covered >= 0}
        self.by_storage: dict[int, Block] = {b.storage: b for b in graph.blocks if b.storage >= 0}
        forward = [t for t in graph.tasks if t.phase == FORWARD]
        self.makers = by_key((block, t.index) for t in forward for block in t.writes)
        self.written = {block: tasks[-1] for block, tasks in self.makers.items()}
        self.of_call = by_key((t.call, t.index) for t in graph.tasks)
        self.input_part: dict[int, int] = {}
        self.made_bytes: dict[int, int] = defaultdict(int)
        """By task the bytes of the blocks that are first there during it."""
        for block in graph.blocks:
            self.made_bytes[block.first] += block.nbytes
        weight_part: dict[int, int] = {}
        for task in graph.tasks:
            if task.part == "weight":
                weight_part[task.call] = task.index
            elif task.part == "input" and task.call in weight_part:
                self.input_part[weight_part[task.call]] = task.index

    def rows(self, block: int) -> int:
        """The first dimension of a block that is a storage; 1 for one without any."""
        shape = self.graph.storages[self.graph.blocks[block].storage].shape
        return shape[0] if shape else 1

    def joint_bytes(self, covered: int) -> dict[int, int]:
        """The bytes, by task of backward, that a node which takes both gradients of a covered call at once holds
        besides. During the tasks that make the input's gradient, sums with those of other readers among them, that is
        the saved input. A convolution's node makes that gradient first: it is there during the weight gradient's task,
        and as large as the input."""
        call = self.covered[covered]
        storages = (self.graph.storages[s.storage] for s in call.saves)
        nbytes = max((s.nbytes for s in storages if s.kind != "parameter"), default=0)
        parts = {t: self.graph.tasks[t].part for t in self.backward_of(covered)}
        both = ("input", "weight") if call.op == "conv2d" else ("input",)
        return {task: nbytes for task, part in parts.items() if part in both}

    def backward_of(self, covered: int) -> list[int]:
        return [t for t in self.of_call[self.covered[covered].index] if self.graph.tasks[t].phase == BACKWARD]

    def block(self, storage: int) -> Block:
        """The block of a storage. Raises PlanError for one that the step has not."""
        if storage not in self.by_storage:
            raise PlanError(
                f"decision for storage {storage}: the step knows no such storage (it has "
                f"{len(self.by_storage)}); plan the graph that is run"
            )
        return self.by_storage[storage]


def used_at(block: Block, task: int) -> bool:
    """Whether a task of backward reads a block."""
    return any(u.task == task for u in block.uses)
