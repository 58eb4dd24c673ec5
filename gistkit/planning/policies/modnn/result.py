"""What moDNN's scheduling yields, and the two equations by which it decides (DATE 2018, section IV-B)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Move:
    """One transfer on StrmD: decided before ``task``; ``direction`` is d2h or h2d."""

    block: int
    nbytes: int
    direction: str
    task: int
    start_s: float
    finish_s: float


@dataclass(frozen=True)
class Absence:
    """A block's time in host memory: it has left before task ``release`` and has its memory again from ``prefetch``."""

    block: int
    release: int
    prefetch: int


@dataclass(frozen=True)
class Schedule:
    """moDNN's static schedule of one step (of one sub-batch), in its own clock.

    By task: ``start_s``, ``finish_s``, ``delay_s`` (waiting before the start), ``algorithms``, ``memory_bytes`` (all
    that is allocated while it runs, resident blocks included). ``defragmented`` holds tasks before which it was.
    """

    start_s: tuple[float, ...]
    finish_s: tuple[float, ...]
    delay_s: tuple[float, ...]
    algorithms: tuple[str, ...]
    memory_bytes: tuple[int, ...]
    moves: tuple[Move, ...]
    absences: tuple[Absence, ...]
    defragmented: tuple[int, ...]

    @property
    def step_s(self) -> float:
        """Seconds until the last task has finished."""
        return self.finish_s[-1] if self.finish_s else 0.0

    @property
    def peak_bytes(self) -> int:
        """The most that is allocated at a time."""
        return max(self.memory_bytes, default=0)

    def moved_bytes(self, direction: str) -> int:
        """Bytes that cross the link in a direction, d2h or h2d."""
        return sum(m.nbytes for m in self.moves if m.direction == direction)


def start_prefetch_now(now_s: float, task_s: float, transfers_s: Iterable[float], expected_start_s: float) -> bool:
    """Eq. (4): whether a prefetch begun after the task that starts now would be too late for the one that needs it."""
    return now_s + task_s + sum(transfers_s) > expected_start_s


def gain_s(base_s: float, algorithm_s: float, offload_s: float, prefetch_s: float) -> float:
    """Eq. (5): what an algorithm wins over the baseline, less the delay that its workspace's offloads cause and the
    prefetches that it holds up."""
    return base_s - algorithm_s - offload_s - prefetch_s
