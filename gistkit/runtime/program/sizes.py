"""The programs of a model's forwards under a budget, by size.

What PyTorch's own ops save is known by its shape (:meth:`gistkit.runtime.program.program.Program.uncovered`). So a
forward of another size than those before it, as an epoch's last batch and the last of uneven sub-batches are, is
captured and compared with the plan too; it is refused with a PlanMismatchError where it goes another way.
"""

from __future__ import annotations

import torch

from gistkit.ir import Plan
from gistkit.runtime.program.match_plan import Shapes, given_program, shapes
from gistkit.runtime.program.program import Program

MOST = 64
"""Sizes that are remembered; beyond that all are forgotten."""


class Sizes:
    """Of one model under a plan with a budget."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._known: dict[tuple[tuple, Shapes], Program] = {}

    def program(self, key: tuple, model: torch.nn.Module, args: tuple, kwargs: dict) -> Program:
        """The program of a forward of that kind and size. Raises PlanMismatchError where it is not the planned one."""
        now = shapes(args, kwargs)
        found = self._known.get((key, now))
        if found is None:
            if len(self._known) >= MOST:
                self._known.clear()
            found = self._known[key, now] = given_program(self._plan, model, args, kwargs)
        return found
