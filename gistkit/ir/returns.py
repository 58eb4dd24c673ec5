"""What it takes to bring a storage back: the recipe of a rebuild (:class:`gistkit.ir.plan.Decision`), a rerun of the
forward, and the scratch memory of verifying it under a budget, in parts (:mod:`gistkit.runtime.stash.verify`), so that
the first step of a shape stays within the plan's peak as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gistkit.formats import ceil_div

WORD_BYTES = 8
"""A digest sums 64-bit words."""
_PARTS, _LEAST_PART_BYTES = 64, 512
_ARITHMETIC_COPIES = 4
"""Bytes of a part, widened to fp32, that a batch norm's arithmetic holds, in those of the part."""


def part_bytes(nbytes: int) -> int:
    """Bytes of one of the parts in which a storage of ``nbytes`` is compared."""
    return min(nbytes, max(_LEAST_PART_BYTES, ceil_div(nbytes, _PARTS)))


def digest_bytes(nbytes: int, rows: int) -> int:
    """Scratch of a digest: a part as words, its weights, and a few words a row."""
    return 2 * (part_bytes(nbytes) + WORD_BYTES * rows) + 4 * WORD_BYTES * rows


def arithmetic_bytes(nbytes: int, dtype: str) -> int:
    """Scratch beside a batch norm's output that PyTorch's operators make anew, for a part (nn.norm.Bound.widens)."""
    return 0 if dtype == "float32" else _ARITHMETIC_COPIES * part_bytes(nbytes)


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


@dataclass(frozen=True)
class Rerun:
    """``calls`` run anew, in the order of the forward, and make ``inside``; they start from ``needs``."""

    calls: tuple[int, ...]
    inside: frozenset[int]
    needs: frozenset[int]


def rerun_of(
    wanted: Iterable[int],
    writers: Mapping[int, Sequence[int]],
    reads: Callable[[int], Iterable[int]],
    stays: Callable[[int], bool],
) -> Rerun:
    """The rerun that brings the ``wanted`` storages back. ``writers`` are the calls that write to a storage, ``reads``
    gives the storages that a call reads, ``stays`` whether one is there in backward without the rerun."""
    inside, needs, calls = set(wanted), set(), set()
    work = list(inside)
    while work:
        for call in writers.get(work.pop(), ()):
            if call in calls:
                continue
            calls.add(call)
            for read in reads(call):
                if read in inside or read in needs:
                    continue
                if stays(read):
                    needs.add(read)
                else:
                    inside.add(read)
                    work.append(read)
    return Rerun(tuple(sorted(calls)), frozenset(inside), frozenset(needs))
