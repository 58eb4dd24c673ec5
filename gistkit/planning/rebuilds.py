"""Which of the tensors that backward reads are kept, and which are computed anew from those: rebuilds.

The choice is a minimum cut over all of forward (:func:`gistkit.planning.flow.cheapest`), so that a tensor
that PyTorch's cut did not keep is kept where it serves several rebuilds: a convolution's output for the norm, the
activation and the mask behind it. A cut alone would rebuild the last block's input from every block before it. So
each rebuild is held to limits, and where it exceeds them a value on its way is kept after all: the last that serves
most such rebuilds for its bytes. Those are made that free most bytes for their time, up to a share of the step's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from gistkit.planning.flow import BYTES_A_S, CHEAP, FREE, UNKEPT, Flow, Limits, Value, cheapest, region

_ROUNDS = 12
ENOUGH = 1.45
"""How many times less is to be kept for a share of time to be enough."""
_JOINED = 0.5
"""What a write takes within a kernel that runs anyhow, of its bytes' time. ViT-S's GELUs: 0.3 on an H200, 0.6 on an
H100, as the bandwidth does not limit their gradients' kernel alone."""
_SMALL = 64
"""Operands of a rebuild that are this much smaller than its largest one, as statistics and biases, are not counted."""
ROW_SOURCES = 2
"""Large tensors that a rebuild within a layer norm's backward reads, at most: Inductor divides a kernel of over ten."""


@dataclass(frozen=True)
class Cone:
    """How one tensor is rebuilt. ``nodes``: what is computed anew, in order, ``root`` last. ``leaves``: what that is
    computed from, ``extra_leaves`` what of that is kept for rebuilds only, and ``rebuilt_leaves`` what of it is rebuilt
    itself, and read where that is.
    ``saved_bytes``: bytes not kept for the root any more. ``read_bytes``: bytes that are read instead of them.
    ``time_s``: modelled, to read those, to write the root, and of products."""

    root: str
    nodes: tuple[str, ...]
    leaves: tuple[str, ...]
    extra_leaves: tuple[str, ...]
    rebuilt_leaves: tuple[str, ...]
    saved_bytes: int
    read_bytes: int
    time_s: float


@dataclass(frozen=True)
class Choice:
    """``kept``: storages that stay or are kept in addition, by the names of the values that own them, and ``reasons``
    for each. ``cones``: one for each tensor that is rebuilt, in forward's order; ``left_out``: those that take too
    long."""

    kept: tuple[str, ...]
    reasons: tuple[str, ...]
    cones: tuple[Cone, ...]
    left_out: tuple[Cone, ...]


@dataclass(frozen=True)
class _Reach:
    """A rebuild before it is chosen: names of what is computed, names of what it reads, of those the ones that are
    rebuilt themselves, all that these are rebuilt from in turn, its depth and bytes read."""

    nodes: tuple[str, ...]
    leaves: tuple[str, ...]
    rebuilt: tuple[str, ...]
    chain: frozenset[str]
    depth: int
    read_bytes: int
    largest: int
    row_sources: int = 0


class _Search:
    def __init__(self, flow: Flow, limits: Limits) -> None:
        self.flow, self.limits = flow, limits
        self.least = max(limits.least_bytes, int(limits.least_share * flow.plain_bytes()))
        self.roots = [v.name for v in flow.needed() if flow.base(v).weight >= self.least]
        self.small = {flow.base(v).name for v in flow.needed() if flow.base(v).weight < self.least}
        self.reached_at: frozenset[str] = frozenset()
        self.reached: dict[str, _Reach] = {}

    def anew(self, v: Value) -> bool:
        return v.kind == CHEAP and (v.follows or not self.limits.bitwise)

    def weight(self, v: Value) -> int:
        return v.weight if v.settled or not self.limits.bitwise else UNKEPT

    def reach(self, root: str, kept: Collection[str]) -> _Reach:
        if (at := frozenset(kept)) != self.reached_at:
            self.reached_at, self.reached = at, {}
        if root not in self.reached:
            self.reached[root] = self._reach(root, at)
        return self.reached[root]

    def _reach(self, root: str, kept: frozenset[str]) -> _Reach:
        values = self.flow.values
        if root in kept:
            return _Reach((), (), (), frozenset(), 1, 0, values[root].read_bytes)
        loaded = self.loaded(root, kept)
        nodes = [v.name for v in region(self.flow, [root], self.anew, {*kept, *loaded})]
        inside = set(nodes)
        leaves = list(dict.fromkeys(n for name in nodes for n in values[name].inputs if n not in inside))
        rebuilt = tuple(n for n in leaves if n in loaded)
        before = {n: self.reach(n, kept) for n in rebuilt}
        chain = frozenset(rebuilt).union(*(r.chain | set(r.nodes) for r in before.values()))
        depth = {n: r.depth for n, r in before.items()}
        for name in nodes:
            v = values[name]
            own = v.needed and not v.view and v.name != root if self.anew(v) else self.limits.depth  # beyond the limit
            depth[name] = max((depth.get(n, 0) for n in v.inputs), default=0) + own
        width = max((values[n].read_bytes for n in nodes), default=0)
        reads = {values[n].storage: min(values[n].read_bytes, width) for n in leaves}
        largest = max(values[root].read_bytes, *reads.values(), 0)
        large = sum(n for n in reads.values() if n * _SMALL > largest)
        sources = sum(4 * n >= largest for n in reads.values()) if any(values[n].by_row for n in nodes) else 0
        return _Reach(tuple(nodes), tuple(leaves), rebuilt, chain, depth.get(root, 0) + 1, large, largest, sources)

    def loaded(self, root: str, kept: Collection[str]) -> set[str]:
        """Other rebuilt tensors that a rebuild reads where they are rebuilt: forward loads them from memory there."""
        values = self.flow.values
        found = {n for n in self.roots if n != root and n not in kept and self.anew(values[n])}
        while True:
            inside = region(self.flow, [root], self.anew, {*kept, *found})
            computed = {n for v in inside for n in v.inputs if n in found and n not in v.loads}
            if not computed:
                return found.intersection(n for v in inside for n in v.inputs)
            found -= computed

    def exceeds(self, root: str, reach: _Reach) -> bool:
        many = not self.limits.bitwise and reach.row_sources > ROW_SOURCES
        return many or reach.depth > self.limits.depth or reach.read_bytes > self.limits.reads * reach.largest

    def reason(self, name: str) -> str:
        v = self.flow.values[name]
        if name in self.small:
            return f"fewer than {self.least} bytes"
        if v.kind != CHEAP:
            return "made by an operator that only forward runs"
        if not self.anew(v):
            return "its bits depend on the kernels that Inductor chooses"
        bits = ", bit for bit" if self.limits.bitwise else ""
        return f"no sources are cheaper within {self.limits.reads:g}x reads and depth {self.limits.depth}{bits}"

    def solve(self) -> set[str]:
        pins, kept, more = set(self.small), set[str](), set[str]()
        for _ in range(_ROUNDS):
            kept = pins | cheapest(self.flow, self.roots, self.anew, self.weight, pins)
            if not (more := self.pinned(kept)):
                break
            pins |= more
        return self.pruned(kept | more, pins)

    def pinned(self, kept: set[str]) -> set[str]:
        """What to keep in addition so that every rebuild is within the limits."""
        pins: set[str] = set()
        reaches = {root: self.reach(root, kept) for root in self.roots}
        while True:
            over = [root for root in self.roots if self.exceeds(root, reaches[root])]
            if not over:
                return pins
            pin = self.best_pin(over, reaches, kept | pins)
            if pin in kept or pin in pins:  # a view of it is all that is left
                return pins
            pins.add(pin)
            for root in self.roots:
                if pin in reaches[root].nodes or pin in reaches[root].chain:
                    reaches[root] = self.reach(root, kept | pins)

    def best_pin(self, over: list[str], reaches: dict[str, _Reach], kept: set[str]) -> str:
        values, first = self.flow.values, over[0]
        hits = Counter(name for root in over for name in {*reaches[root].nodes, *reaches[root].chain})
        best, score = self.flow.base(values[first]).name, 0.0
        for name in (n for n in values if n in reaches[first].nodes or n in reaches[first].chain):
            weight = self.weight(values[name])
            if weight >= UNKEPT or self.exceeds(first, self.reach(first, {*kept, name})):
                continue
            if hits[name] / max(weight, 1) >= score:
                best, score = name, hits[name] / max(weight, 1)
        return best

    def pruned(self, kept: set[str], pins: set[str]) -> set[str]:
        """Without those pins that all rebuilds stay within the limits without."""
        for name in sorted(kept & pins - self.small, key=lambda n: -self.flow.values[n].weight):
            without = kept - {name} if self.anew(self.flow.values[name]) else kept
            if not any(self.exceeds(r, self.reach(r, without)) for r in self.roots):
                kept = without
        return kept


def choose(flow: Flow, limits: Limits) -> Choice:
    """The choice for a flow, within the first of the shares of time where that keeps enough less, else the last."""
    search = _Search(flow, limits)
    kept = search.solve()
    for share in limits.shares:
        choice = _within(search, kept, share * flow.step_s + flow.spare_s)
        if ENOUGH * flow.kept_bytes(choice.kept) <= flow.plain_bytes():
            break
    return choice


def _within(search: _Search, kept: set[str], most_s: float) -> Choice:
    """The choice that takes at most so many seconds by the model, from what all rebuilds would have kept."""
    flow, slow = search.flow, dict[str, Cone]()
    cones = _cones(search, kept)
    while not (over := _slowest(flow, cones, most_s)).keys() <= slow.keys():  # else views of what is kept are left
        slow |= over
        cones = _cones(search, kept | set(slow))
    for name, cone in sorted(slow.items(), key=lambda item: -item[1].saved_bytes / max(item[1].time_s, 1e-12)):
        if sum(c.time_s for c in cones) + cone.time_s <= most_s:  # it may fit after all
            more = _cones(search, kept | (slow.keys() - {name}))
            if not _slowest(flow, more, most_s):
                cones = more
                del slow[name]
    rebuilt = {cone.root for cone in cones}
    used = dict.fromkeys([*search.small, *(flow.base(flow.values[r]).name for r in search.roots if r not in rebuilt)])
    used |= dict.fromkeys(n for cone in cones for n in _kept_leaves(flow, cone.leaves, cone.rebuilt_leaves))
    names = tuple(n for n in flow.values if n in used)
    words = {n: f"computing it anew would take {1e6 * cone.time_s:.0f} us by the model" for n, cone in slow.items()}
    reasons = tuple(words.get(n) or search.reason(n) for n in names)
    return Choice(names, reasons, tuple(cones), tuple(slow.values()))


def _cones(search: _Search, kept: set[str]) -> list[Cone]:
    """Each rebuild. A view of a kept storage that no other rebuild reads stays as it is, instead of its base."""
    flow, cones = search.flow, list[Cone]()
    reaches = {root: search.reach(root, kept) for root in search.roots}
    read = {n for reach in reaches.values() for n in reach.leaves if not _only_views(flow, reach)}
    lone = {r for r, reach in reaches.items() if _only_views(flow, reach) and not set(reach.leaves) & read}
    anew = {r: reach for r, reach in reaches.items() if reach.nodes and r not in lone}
    stay = {flow.base(v).storage for v in flow.needed() if v.name not in anew}
    for root, reach in anew.items():
        base = flow.base(flow.values[root])
        gone = base.storage not in stay
        stay.add(base.storage)  # counted once
        extra = tuple(n for n in _kept_leaves(flow, reach.leaves, reach.rebuilt) if not flow.values[n].needed)
        saved_bytes, time_s = base.weight if gone else 0, _time_s(search, root, reach)
        cones.append(Cone(root, reach.nodes, reach.leaves, extra, reach.rebuilt, saved_bytes, reach.read_bytes, time_s))
    return cones


def _kept_leaves(flow: Flow, leaves: tuple[str, ...], rebuilt: tuple[str, ...]) -> list[str]:
    return [n for n in leaves if flow.values[n].kind != FREE and n not in rebuilt]


def _time_s(search: _Search, root: str, reach: _Reach) -> float:
    """Modelled seconds of a rebuild: 0 of a view. Where bits may differ it is computed by kernels that read most of its
    sources anyhow. So it is on a GPU where only libraries read it, but not for a layer norm: the kernel that reads that
    norm's sources sums rows, and stays as it is. A product reads and writes in its own time, and what is made of it
    reads it."""
    flow, made = search.flow, search.flow.values[root]
    if _only_views(flow, reach):
        return 0.0
    products = [n for n in reach.nodes if flow.values[n].product_s]
    pointwise = flow.base(made).name not in products
    joins = made.for_libraries and not any(flow.values[n].by_row for n in (*reach.nodes, *reach.leaves))
    reads = search.limits.bitwise and not joins
    moved = pointwise * (reach.read_bytes * reads + (_JOINED if joins else 1) * made.read_bytes)
    moved += sum(flow.values[n].read_bytes for n in products if n != flow.base(made).name)
    return sum(flow.values[n].product_s for n in products) + moved / BYTES_A_S


def _slowest(flow: Flow, cones: list[Cone], most_s: float) -> dict[str, Cone]:
    """What to keep after all, with the cones that free no bytes, or least for their time: half of what exceeds the
    limit, so that others become cheaper. Those of one storage go together; those that a value is kept for share its
    bytes, by what they save."""
    saved, storages = Counter[str](), dict[int, list[Cone]]()
    for cone in cones:
        saved.update(dict.fromkeys(cone.extra_leaves, cone.saved_bytes))
        storages.setdefault(flow.values[cone.root].storage, []).append(cone)

    def freed(group: list[Cone]) -> float:
        used = ((cone.saved_bytes, n) for cone in group for n in cone.extra_leaves if cone.saved_bytes)
        return sum(cone.saved_bytes for cone in group) - sum(b * flow.values[n].weight / saved[n] for b, n in used)

    def time_s(group: list[Cone]) -> float:
        return sum(cone.time_s for cone in group)

    found: dict[str, Cone] = {}
    over_s = (sum(cone.time_s for cone in cones) - most_s) / 2
    for group in sorted(storages.values(), key=lambda group: freed(group) / max(time_s(group), 1e-12)):
        if over_s > 0 or freed(group) <= 0 < time_s(group):
            found |= {flow.base(flow.values[cone.root]).name: cone for cone in group}
            over_s -= time_s(group)
    return found


def _only_views(flow: Flow, reach: _Reach) -> bool:
    return all(flow.values[n].view or flow.values[n].storage < 0 for n in reach.nodes)
