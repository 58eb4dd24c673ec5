"""The tasks of one training step and the blocks of memory they work on: the dataflow that planners read. Pure data.

A *task* is what runs as a whole: one call of the forward, or one node of the backward; a convolution's or a linear's
backward is two tasks, the weight gradient (``part="weight"``), then the input gradient (``part="input"``), as in
moDNN's task dataflow graph (section II-2). A *block* is one storage that the step needs: parameters, inputs,
activations, gradient maps, weight gradients. Ids are dense: ``tasks[i].index == i``, ``blocks[i].id == i``.

Times of life are in task indices. A block is there *during* a task when the task's operators have run and what they
made and read is still there: that moment is the task's memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")
FORWARD, BACKWARD = "forward", "backward"
BEFORE = -1
"""``Block.first`` of what is there before the step."""


def by_key(pairs: Iterable[tuple[K, V]]) -> defaultdict[K, list[V]]:
    """The values of each key, in the pairs' order."""
    found: defaultdict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found


def summed(lives: Iterable[tuple[int, int, int]], tasks: int) -> list[int]:
    """The bytes during each of so many tasks, of (first task, last task, bytes)."""
    change = [0] * (tasks + 1)
    for first, last, nbytes in lives:
        if first < tasks and last >= first:
            change[first if first > 0 else 0] += nbytes
            if last < tasks:
                change[last + 1] -= nbytes
    return list(accumulate(change[:tasks]))


@dataclass(frozen=True)
class ConvShape:
    """A convolution: batch, input channels, height, width; output channels, height, width; kernel, stride, groups."""

    n: int
    c: int
    h: int
    w: int
    k: int
    out_h: int
    out_w: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1


@dataclass(frozen=True)
class Task:
    """One task: phase ``forward`` or ``backward``; the SavedGraph call it belongs to (-1: none); the blocks it reads.
    ``writes`` holds what it makes or overwrites. ``flops`` counts a multiplication and an addition as two.
    ``moved_bytes`` is the device-memory traffic of PyTorch's own operators. ``transient_bytes`` is what it makes and
    frees itself beyond its reads and writes, at its worst moment; ``plain_bytes`` what PyTorch's own operators take of
    that kind and gistkit's do not. ``conv`` is given for convolutions. ``draws``: it draws random numbers."""

    index: int
    phase: str
    op: str
    call: int
    module: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    flops: int
    moved_bytes: int
    dtype: str = "float32"
    part: str = ""
    transient_bytes: int = 0
    conv: ConvShape | None = None
    plain_bytes: int = 0
    draws: bool = False

    @property
    def part_name(self) -> str:
        """The task's name among those of its call: its part, where it has none its phase."""
        return self.part or self.phase


@dataclass(frozen=True)
class Use:
    """A backward task that needs a saved block; ``values`` False: its signs only (a ReLU of its own output)."""

    task: int
    values: bool = True


@dataclass(frozen=True)
class Block:
    """One storage of the step. ``storage`` is its id in the SavedGraph (-1: none; gradients have none). ``first`` is
    the task that makes it, :data:`BEFORE` where it exists before the step; ``last`` the last task during which it is
    there if backward keeps nothing, ``len(tasks)`` where it outlives the step. ``saved`` is the task from which
    autograd holds it (-1: never), ``uses`` the backward tasks that need it, in order; so plain PyTorch holds it until
    the last of them. A saved block without a use (a pool's input: only its shape is read) is held by plain PyTorch
    until ``holder``, the last backward task that owns a reference. Where nodes that lead nowhere hold it until they die
    during the forward, ``last`` is that, and ``read`` the last task during which it would be there without them: a form
    that stands for it is all that they hold from then on (-1: there are none such). ``released``: of the model's
    output, which a loop's variable holds to the end, the last task before backward, where nothing else does (else
    -1)."""

    id: int
    kind: str
    nbytes: int
    storage: int
    first: int
    last: int
    saved: int = -1
    uses: tuple[Use, ...] = ()
    holder: int = -1
    dtype: str = "float32"
    name: str = ""
    read: int = -1
    released: int = -1
