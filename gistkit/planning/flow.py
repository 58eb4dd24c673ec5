"""What forward computes on the way to what backward reads, as plain data: the input of the choice of rebuilds
(:mod:`gistkit.planning.rebuilds`).

A :class:`Flow` has a :class:`Value` for each node of forward, in order. Storages are what memory is counted by: a view
has its base's storage, costs nothing, and is kept for itself only where keeping its base would change forward's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property

from gistkit.planning.min_cut import UNKEPT, least_cut  # UNKEPT: views, and what would be rounded if it were kept

FREE, CHEAP, MADE = "free", "cheap", "made"
"""A value that is there anyhow (a parameter, a tensor that PyTorch keeps besides); one that pointwise operators, views,
copies and products that make more than they read make; one that only the forward can make (a product, a reduction)."""
BYTES_A_S = 2.6e12  # taken for an H100: 78 % of its memory's rate


@dataclass(frozen=True)
class Limits:
    """``depth``: of rebuilt tensors that a rebuilt one is computed from, one from the other, itself included.
    ``reads``: bytes that a rebuild may read, in multiples of the largest tensor that it reads or makes.
    ``least_bytes``, ``least_share`` of all kept bytes: what is smaller is kept as it is, as a weight in bf16: launching
    a kernel costs more than its bytes. ``bitwise``: forward keeps the kernels of plain ``torch.compile``, and only
    rebuilds are made that give its bits by construction. ``products``: some may be made anew. ``shares``: of the
    step's modelled time, each a limit for all rebuilds; the first with which enough less is kept holds, else the last.
    ``bits``: of a kept float, at most."""

    depth: int = 4
    reads: float = 4.0
    least_bytes: int = 1 << 16
    least_share: float = 1e-3
    bitwise: bool = True
    products: bool = True
    shares: tuple[float, ...] = (float("inf"),)
    bits: int = 64


@dataclass(frozen=True)
class Value:
    """One value of forward. ``inputs``: names of those it is computed from. ``weight``: bytes to keep it, in its packed
    form where it has one. ``read_bytes``: bytes that a kernel reads to use it. ``needed``: whether backward reads it.
    ``view``: it has the storage of its first input. ``follows``: computed anew from its inputs it has the forward's
    bits and layout, by construction. ``settled``: keeping it changes no bit of forward. ``loads``: those of its inputs
    that backward reads too and that forward's kernel loads from memory. ``product_s``: what a product takes.
    ``by_row``: it reads a value for each row, as a layer norm's mean. ``for_libraries``: backward's are its readers."""

    name: str
    inputs: tuple[str, ...]
    kind: str
    storage: int
    weight: int
    read_bytes: int
    needed: bool = False
    view: bool = False
    follows: bool = True
    settled: bool = True
    loads: frozenset[str] = frozenset()
    product_s: float = 0.0
    by_row: bool = False
    for_libraries: bool = False


@dataclass(frozen=True)
class Flow:
    """The values of one forward by name, in order, and the modelled time of its step. ``spare_s``: how much quicker
    than plain ``torch.compile``'s that is without rebuilds, which they may take beside a share of it."""

    values: dict[str, Value]
    step_s: float = float("inf")
    spare_s: float = 0.0

    @cached_property
    def places(self) -> dict[str, int]:
        """Where a value is in forward's order, by name."""
        return {name: place for place, name in enumerate(self.values)}

    def needed(self) -> list[Value]:
        """What backward reads, less what is there anyhow."""
        return [v for v in self.values.values() if v.needed and v.kind != FREE]

    def plain_bytes(self) -> int:
        """Bytes between forward and backward without rebuilds, packed."""
        return sum({v.storage: self.base(v).weight for v in self.needed()}.values())

    def kept_bytes(self, names: Collection[str]) -> int:
        """Bytes of the storages of values, packed."""
        return sum({self.values[n].storage: self.values[n].weight for n in names}.values())

    def base(self, v: Value) -> Value:
        """The value that is kept for v: itself, or the one that owns a view's storage."""
        while (v.view and v.weight >= UNKEPT) or v.storage < 0:
            v = self.values[v.inputs[0]]
        return v


def region(flow: Flow, roots: Collection[str], anew: Callable[[Value], bool], kept: Collection[str]) -> list[Value]:
    """What ``roots`` are computed from, themselves included: up to what is free or in ``kept``, and what cannot be
    computed ``anew``; in forward's order."""
    found: set[str] = set()
    stack = list(roots)
    while stack:
        v = flow.values[stack.pop()]
        if v.name in found or v.kind == FREE or v.name in kept:
            continue
        found.add(v.name)
        if anew(v):
            stack.extend(v.inputs)
    return [flow.values[name] for name in sorted(found, key=flow.places.__getitem__)]


def cheapest(
    flow: Flow, roots: Collection[str], anew: Callable[[Value], bool], weight: Callable[[Value], int],
    kept: Collection[str],
) -> set[str]:  # fmt: skip
    """Names of the values to keep besides ``kept``, which cost nothing here; nothing is that saves no byte by it."""
    values = region(flow, roots, anew, kept)
    weights, inputs = {v.name: weight(v) for v in values}, {v.name: v.inputs for v in values if anew(v)}
    return least_cut(weights, inputs, set(roots)) if values else set()
