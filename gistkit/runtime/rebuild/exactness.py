"""Rebuilds are relied on only once they have given a forward's bits, in each shape, dtype and layout and on each
device.

The arithmetic of each batch norm is found by drawn tensors (:mod:`gistkit.runtime.rebuild.arithmetic`); then the whole
recipe is compared with the forward's own output. Under a budget, where no second such tensor has room in forward, a
digest of the output is compared with what backward rebuilds first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gistkit.runtime.rebuild.arithmetic import arithmetics
from gistkit.runtime.rebuild.terms import ADD, NormSource, Recipe, ReluTerm, can_fuse
from gistkit.runtime.stash.stash import RebuiltBody
from gistkit.runtime.stash.verify import Digest, Trial, same_bits

Bind = Callable[[Recipe], Any]
"""From a recipe to its term in the running forward, or None."""


def norms_of(steps: tuple, node: Any, norms: Mapping[int, NormSource]) -> dict[int, NormSource] | None:
    """By covered call the batch norms that a recipe starts from, found from the node of the ReLU's input on; None where
    the nodes are not the recipe's."""
    kind, first = steps[0], steps[1]
    if kind == "stash":
        return {}
    if kind == "bn":
        source = norms.get(first) or NormSource.of(node)
        return None if source is None else {first: source}
    if kind != "add" or type(node).__name__ != ADD:
        return None
    parts = [norms_of(s, n, norms) for s, (n, _) in zip(steps[1:], node.next_functions, strict=True)]
    return None if None in parts else {k: v for part in parts for k, v in part.items()}  # type: ignore[union-attr]


class Exactness:
    """How one ReLU's output y comes back exactly: by one launch, else operator by operator, else not at all.

    ``verified`` remembers what was found, by call, recipe and geometry; results are looked up there.
    """

    def __init__(self, verified: dict, call: int, steps: tuple, y: torch.Tensor) -> None:
        self._verified, self._steps, self._y = verified, steps, y
        self._key = ("relu", call, steps, y.dtype, y.device, tuple(y.shape), y.stride())

    def recipes(self, node: Any, norms: Mapping[int, NormSource], bind: Bind) -> list[Recipe]:
        """The recipe in the ways that may be exact, the quickest first."""
        found = norms_of(self._steps[1], node, norms)
        if found is None:
            return []
        known = {index: arithmetics(self._verified, source.kind) for index, source in found.items()}
        if not all(known.values()):
            return []
        chosen = {index: able[0] for index, able in known.items()}
        by_operators = Recipe(self._steps, chosen, self._y, fused=False)
        term = bind(by_operators)
        if term is None:
            return []
        fuses = isinstance(term, ReluTerm) and can_fuse(term)
        return [Recipe(self._steps, chosen, self._y, fused=True), by_operators] if fuses else [by_operators]

    def check(self, recipes: list[Recipe], bind: Bind) -> Recipe | None:
        """The first recipe that gives y's bits now. Synchronises where it is new."""
        if self._key not in self._verified:
            y = self._y.detach()
            with torch.no_grad():
                same = (same_bits(RebuiltBody(bind(r), y).dense(), y) for r in recipes)
                self._verified[self._key] = next((i for i, equal in enumerate(same) if equal), None)
        number = self._verified[self._key]
        return None if number is None or number >= len(recipes) else recipes[number]

    @property
    def known(self) -> bool:
        """Whether it has been found out already."""
        return self._key in self._verified

    def later(self, recipes: list[Recipe], bind: Bind, refuse: Callable[[], None]) -> RebuiltBody:
        """A body that finds out at its first use which recipe is exact; ``refuse()``, which must raise, is
        called where none is."""
        verified, key = self._verified, self._key  # the body must not hold y

        def found(number: int | None) -> None:
            verified[key] = number
            if number is None:
                refuse()

        ways = [RebuiltBody(bind(r), self._y).dense for r in recipes]
        return RebuiltBody(Trial(ways, Digest(self._y.detach()), found), self._y)
