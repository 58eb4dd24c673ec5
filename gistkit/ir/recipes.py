"""What a rebuild's recipe (:class:`gistkit.ir.plan.Decision`) reads, moves and holds."""

from __future__ import annotations

from typing import Any


def is_recipe(term: Any) -> bool:
    """Whether nested tuples make sense as a recipe or a part of one."""
    match term:
        case ("bn" | "stash", int()):
            return True
        case ("relu", a):
            return is_recipe(a)
        case ("add", a, b):
            return is_recipe(a) and is_recipe(b)
    return False


def norms(recipe: tuple) -> set[int]:
    """The covered batch norms in a recipe."""
    if not recipe or recipe[0] == "stash":
        return set()
    return {recipe[1]} if recipe[0] == "bn" else set().union(*(norms(r) for r in recipe[1:]))


def chain(recipe: tuple) -> tuple[int, int]:
    """(tensors read and written, kernels) of a recipe."""
    if recipe[0] == "stash":
        return 0, 0
    parts = [chain(r) for r in recipe[1:] if isinstance(r, tuple)]
    moved = 3 if recipe[0] == "add" else 2
    return moved + sum(p[0] for p in parts), 1 + sum(p[1] for p in parts)


def held(recipe: tuple) -> int:
    """Tensors that a recipe over dense sources holds at its worst moment; additions and ReLUs run in place."""
    if not recipe or recipe[0] == "bn":
        return 1
    if recipe[0] == "stash":
        return 0
    parts = [r for r in recipe[1:] if isinstance(r, tuple)]
    if recipe[0] == "add" and all(p[0] != "stash" for p in parts):
        return max(held(parts[0]), 1 + held(parts[1]))
    return max([1, *(held(p) for p in parts)])
