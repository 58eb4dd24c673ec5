"""Timings that count where the core that Python runs on was quiet: where a loop before and behind them took at most
:data:`QUIET` times the least seen in the process. Machines share their cores (:mod:`gistkit.profiling.host`,
which scales its timings by the loop; a step that waits for the device does not scale)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from gistkit.profiling.host import loop_s

QUIET = 1.2


class Timings:
    """Seconds of one piece of work, and the core's pace around each of them."""

    _least = float("inf")
    """The least seconds of a loop in this process."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float]] = []

    def take(self, work: Callable[[], Any]) -> None:
        """Time the work, which waits for what it wants counted."""
        before, begun = loop_s(), time.perf_counter()
        work()
        seconds = time.perf_counter() - begun
        self.add(seconds, before)

    def add(self, seconds: float, loop_before: float) -> None:
        """A timing of one's own, at its end."""
        around = (loop_before, loop_s())
        Timings._least = min(Timings._least, *around)
        self._taken.append((seconds, max(around)))

    @property
    def quiet(self) -> list[float]:
        """The seconds that count, in order: those on a quiet core, all where none was."""
        return sorted(self._on_a_quiet_core() or [seconds for seconds, _ in self._taken])

    @property
    def median(self) -> float:
        """Of those that count."""
        return statistics.median(self.quiet)

    @property
    def figures(self) -> dict[str, Any]:
        """For a row: how many timings count, of how many; the median of the loops' milliseconds, and that of the
        timings in loops, which is the host's work without its core's pace, to 15 %."""
        loops = statistics.median(loop for _, loop in self._taken)
        found = {"quiet_runs": len(self._on_a_quiet_core()), "runs": len(self._taken), "loop_ms": 1e3 * loops}
        return {**found, "in_loops": statistics.median(seconds / loop for seconds, loop in self._taken)}

    def _on_a_quiet_core(self) -> list[float]:
        return [seconds for seconds, loop in self._taken if loop <= QUIET * Timings._least]
