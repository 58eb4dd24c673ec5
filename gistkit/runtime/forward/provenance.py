"""What made the values of a tensor, as far as recipes speak of it.

A recipe says how a ReLU's output followed from what is kept when the model was captured. A forward whose control flow
changed may put something between (a dropped path, a scaled sum, noise) and yet make the same covered calls in the same
shapes. So whoever makes a tensor that recipes name says so here, and a recipe is believed only where it names what
really made the ReLU's input in this forward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Key = tuple
"""A live storage at a version, and the geometry in which it is seen."""


class Origins:
    """The origins of one forward's tensors. ``known``: a live storage and its version as a key that nothing else gets
    before the forward ends (:meth:`gistkit.runtime.stash.stash.StashTable.known`)."""

    __slots__ = ("_known", "_made", "_sums")

    def __init__(self, known: Callable[[torch.Tensor], tuple[int, int]]) -> None:
        self._known = known
        self._made: dict[tuple, Key] = {}
        self._sums: dict[Key, tuple[Key, Key]] = {}

    def key(self, x: torch.Tensor, geometry: tuple = ()) -> Key:
        """x as it is now: the same key is the same values. ``geometry``: x's, but perhaps for where it begins."""
        offset = x.storage_offset()
        if geometry and geometry[3] == offset:
            return self._known(x), geometry
        return self._known(x), (x.dtype, x.shape, x.stride(), offset)

    def made(self, what: str, number: int, x: torch.Tensor) -> None:
        """x is what a recipe calls (what, number): ``("bn", covered call)`` or ``("stash", storage)``."""
        self._made[what, number] = self.key(x)

    def made_as(self, term: tuple, key: Key) -> None:
        """:meth:`made` of a tensor of that key."""
        self._made[term] = key

    def summed(self, a: Key, b: Key, y: torch.Tensor) -> None:
        """y is a plain addition of two tensors as they were before it."""
        self._sums[self.key(y)] = a, b

    def are(self, recipe: tuple, key: Key) -> bool:
        """Whether the tensor of that key came about as the recipe's term says."""
        if recipe[0] != "add":
            return self._made.get(recipe) == key
        operands = self._sums.get(key)
        return operands is not None and self.are(recipe[1], operands[0]) and self.are(recipe[2], operands[1])

    def clear(self) -> None:
        """Forget everything."""
        self._made.clear()
        self._sums.clear()


__all__ = ["Origins"]
