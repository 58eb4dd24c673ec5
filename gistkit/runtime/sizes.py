"""The sizes of forwards under a budget: which were captured, and the programs of those that are smaller.

What PyTorch's own ops save is known by its shape (:meth:`gistkit.runtime.program.Program.uncovered`). A forward of
fewer rows than the one that was captured, as an epoch's last batch and the last of uneven sub-batches are, has other
shapes, so it is captured as well, or all of that would stay as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from gistkit.errors import PlanMismatchError
from gistkit.runtime.given import Shapes, within
from gistkit.runtime.program import Program

MOST = 16
"""Programs of smaller forwards that are held at a time; the one not used for longest goes."""


class Sizes:
    """Of one model under a budget, by kind of forward."""

    def __init__(self) -> None:
        self._known: dict[tuple, list[Shapes]] = {}
        self._smaller: dict[tuple, Program] = {}

    def grows(self, key: tuple, now: Shapes) -> bool:
        """Whether a forward is larger in some dimension than all before it: its capture asks whether it may be."""
        return not any(within(now, known) for known in self._known.get(key, ()))

    def captured(self, key: tuple, now: Shapes) -> None:
        """The kind's program is that of a forward of this size from now on."""
        self._known.setdefault(key, []).append(now)
        self._smaller = {at: program for at, program in self._smaller.items() if at[0] != key}

    def program(
        self, key: tuple, now: Shapes, program: Program, capture: Callable[[], Program], note: Callable[[str], None]
    ) -> Program:
        """The program of a forward of this size, where ``program`` is the kind's own. One that goes another way than
        the plan has the kind's own, which is noted."""
        known = self._known.get(key, ())
        if not program.goes_by_shapes or not known or known[-1] == now:
            return program
        found = self._smaller.pop((key, now), None)
        if found is None:
            try:
                found = capture()
            except PlanMismatchError as error:
                note(f"a smaller forward may exceed the budget, as what uncovered ops save is kept as it is: {error}")
                found = program
        if len(self._smaller) >= MOST:
            del self._smaller[next(iter(self._smaller))]
        self._smaller[key, now] = found
        return found


__all__ = ["Sizes"]
