"""The partitioner that Inductor calls: joint rewrites, PyTorch's own min-cut, then moves: rebuilds and encodings of
what crosses, all of them or as many as a budget needs.

Without a budget every move is made, but of rebuilds those within ``SHARES``. Under one they are made until the
predicted peak (:mod:`gistkit.compiled.memory`) fits: bits and maps, rebuilds, then narrow floats where a format is
named. Where all are too few, and bits may differ, backward runs as few segments of forward again as are needed."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from gistkit.compiled import compat, edit, fusion, pools, recompute, record
from gistkit.compiled.forms import packing
from gistkit.compiled.forms.bits import Bits
from gistkit.compiled.late import rebuild_late
from gistkit.compiled.memory import predicted_peak
from gistkit.compiled.parts import read_from_wholes
from gistkit.compiled.readers import reads_memory
from gistkit.compiled.rebuilds.cones import planned, readers_first
from gistkit.compiled.rebuilds.rounding import behind_views, is_low
from gistkit.compiled.split import Pair, elements, is_pointwise, is_view, storage_bytes, storage_of, storages, value
from gistkit.compiled.workspace import Workspace
from gistkit.errors import BudgetError
from gistkit.formats import VALUE_FORMS
from gistkit.ir import GraphRecord, Kept
from gistkit.planning.cost import parse_budget
from gistkit.planning.flow import Limits
from gistkit.planning.segments import Segment, fewest
from gistkit.version import VERSION

SHARES = {"bitwise": (0.027, 0.03, 0.04, 0.05), "reassociated": (0.07,)}
"""Of a step's modelled time, for rebuilds where no budget asks for more: the first that saves enough, or the last."""

_GATHERED = (torch.ops.aten.cat.default, torch.ops.aten.embedding.default, torch.ops.aten.index.Tensor)
"""Operators that read memory in another order than they write it."""

ROUNDED_SHARE = 0.9
"""With less kept than this share of what all kept floats would take in the format, roundings that take kernels of their
own are left out, unless a budget asks for more. For bf16 and fp16, whose bytes take twice the time, masks count too."""
MIB, LOOKS = 2**20, 32  # at most so often is the peak predicted while moves are made: up to 0.3 s for GPT-2


@dataclass(frozen=True)
class Settings:
    """What the caller asked for, as compiled graphs take it. ``budget``: of one step, as the caller wrote it. ``anew``:
    a note on decisions of the caller's plan that graphs have no form for."""

    lossy: str | None = None
    fidelity: str = "bitwise"
    budget: int | str | None = None
    anew: str = ""

    @property
    def exact(self) -> bool:
        """Whether loss and gradients are to have the bits of torch.compile."""
        return self.fidelity == "bitwise" and self.lossy is None


class Moves:
    """The moves on one pair; ``static``: indices of forward's inputs that outlive the step; ``plain``: where backward
    runs segments again, those on the pair where it does not, whose peak before moves is ``plain_peak_bytes``."""

    def __init__(self, pair: Pair, settings: Settings, static: Sequence[int] = (), plain: Moves | None = None) -> None:
        self.pair, self.settings, self.reruns = pair, settings, plain is not None
        self.notes = [note for note in (settings.anew, fusion.other_draws(pair.forward.graph)) if note]
        self._saved = packing.own_tensors(pair)
        gone = ("recompute", "backward runs its segment again"), ("drop", "nothing reads it any more")
        self._gone = gone[plain is None]
        last = compat.prefers_channels_last(pair.forward)
        self._workspace = plain._workspace if plain else Workspace(() if settings.budget is None else pair.inputs, last)
        self._plain = plain._plain if plain else {storage_of(node): node for node in reversed(self._saved)}
        self._made, self._payload, self._left = dict[str, Kept](), set[str](), dict[str, str]()
        self.plain_peak_bytes = plain.plain_peak_bytes if plain else self.predicted()
        self._rounding, self._enough_bytes, bits = None, [0.0, 0.0], 64
        if settings.lossy is not None:
            follow = packing.of_parameters(pair, static)
            least = int(packing.LEAST_SHARE * sum(map(storage_bytes, self._plain.values())))
            self._rounding = packing.Rounding(settings.lossy, follow, least, settings.budget is not None)
            bits = VALUE_FORMS[settings.lossy][0].bits
            share, all_kept = (settings.budget is None) * ROUNDED_SHARE * bits / 8, self._plain.values()
            floats = [node for node in all_kept if value(node).is_floating_point()]
            self._enough_bytes = [share * sum(map(elements, nodes)) for nodes in (floats, all_kept)]
        self._last = not settings.exact and last
        if not settings.exact:  # another layout sums in another order
            pools.lay_out_stand_ins(pair)
            read_from_wholes(pair)
            for node, whole in pair.whole_of.items():
                self._made[node.name] = packing.described(node, "drop", 0, f"a part of {whole.name}")
        limited = settings.budget is None and settings.lossy is None  # rounding and decoding takes longer
        shares, exact = SHARES[settings.fidelity] if limited else (float("inf"),), settings.exact
        limits = Limits(bitwise=exact, products=limited and exact, shares=shares, bits=bits)
        choice, cones = planned(pair, limits, static)
        if choice.left_out:
            seconds, count = sum(cone.time_s for cone in choice.left_out), len(choice.left_out)
            slow = ", or not enough for their time" if limited else ""
            self.notes.append(f"{count} rebuilds are left out, {1e3 * seconds:.3f} ms: they free no bytes{slow}")
        named = {node.name: node for node in pair.forward.graph.nodes}  # of a view its base is kept
        self._reasons = {storage_of(named[n]): why for n, why in zip(choice.kept, choice.reasons, strict=True)}
        ratio = {cone.root: cone.saved_bytes / max(1e-9, cone.time_s) for cone in choice.cones}
        if settings.exact:  # a view is saved as it is, and what is computed from its base is computed from it
            cones = [c for c in cones if not (all(map(is_view, c.nodes)) and pair.held(c.leaves[0]) is not c.leaves[0])]
            cones = [c for c in cones if not set(c.nodes) & set(c.leaves)]  # loaded by one reader, computed by another
        self._cones = readers_first(sorted(cones, key=lambda cone: -ratio[cone.root.name]))

    def all(self) -> Moves:
        for cone in self._cones:
            self._rebuild(cone)
        self.pair.drop_unread()
        found = packing.choices(self.pair, self._rounding)
        for choice in sorted(found, key=lambda c: (c.kernels, -storage_bytes(c.node))):
            if choice.kernels and self.kept() <= self._enough_bytes[is_low(choice.node)]:
                self._left[choice.node.name] = "rounding it would take a kernel of its own"
            else:
                self._encode(choice)
        return self

    def within(self, budget_bytes: int) -> dict[str, int]:
        """Make moves until the predicted peak fits, or all. The peak by the class of moves, the last one's last."""
        step, peaks = 1 + (len(self._cones) + len(packing.choices(self.pair))) // LOOKS, dict[str, int]()
        due = self.kept()
        for kind, moves in ((self.settings.fidelity, self._exact_moves()), ("lossy", self._narrow_moves())):
            for index, move in enumerate(moves):
                if index % step == 0 and (kept := self.kept()) <= due:
                    due = kept - (self.peak() - budget_bytes)  # a peak falls by as much as is kept less, at most
                    if due >= kept:
                        break
                move()
            if kind != "lossy" or self.settings.lossy:
                peaks[kind] = self.peak()
        return peaks

    def peak(self) -> int:
        """The predicted peak of a step as it is now."""
        self.pair.drop_unread()
        return self.predicted()

    def predicted(self) -> int:
        """The same, with what no operator of backward reads counted as kept."""
        return predicted_peak(self.pair, self.reruns, self._workspace)

    def kept(self) -> int:
        """The bytes that are kept for backward alone as it is now."""
        self.pair.drop_unread()
        return sum(storages(packing.own_tensors(self.pair)).values())

    def met(self, budget_bytes: int, peaks: dict[str, int]) -> None:
        """Note the budget that is met. Raises BudgetError where the last of ``peaks`` is above it."""
        peak, settings = [*peaks.values()][-1], self.settings
        if peak > budget_bytes:
            remedy = "raise it, take a smaller batch" + ("" if settings.lossy else ', or allow lossy="fp8s"')
            remedy += ' or fidelity="reassociated", with either of which segments may run again' * settings.exact
            share = "; a share is one of each graph's own peak, so name bytes for a model with graph breaks"
            remedy += share * str(settings.budget).endswith("%")
            raise BudgetError(budget_bytes, peaks, remedy)
        self.notes.append(
            f"budget {budget_bytes / MIB:.2f} MiB, predicted peak {peak / MIB:.2f} MiB, under torch.compile "
            f"{self.plain_peak_bytes / MIB:.2f} MiB; not counted are the optimiser's states and what libraries "
            "hold between steps"
        )

    def finish(self) -> None:
        """Have forward write what it saves no more where it is to have the kernels of plain torch.compile, and what it
        would else compute twice: what is gathered, in each norm that reads it, and a softmax for a product."""
        for node in self._saved if self.settings.exact else dict.fromkeys(map(behind_views, self._saved)):
            read = any(reads_memory(user) for user in node.users if user.op != "output")  # a view is written then
            due = not (is_view(node) and read) if self.settings.exact else node.target in _GATHERED or read
            if due and node not in self.pair.tensors:
                edit.written(self.pair, node, compat.emulates_casts(saved=True) and is_low(node) and is_pointwise(node))
        if not self.settings.exact:
            edit.early(self.pair)
        pools.take_offsets(self.pair, self.settings.exact)
        self.pair.finish()

    def rows(self) -> list[Kept]:
        """Every storage that plain torch.compile keeps, or that is kept here in addition."""
        found = packing.choices(self.pair, self._rounding)
        reasons = {c.node.name: c.reason for c in found if c.reason != packing.VALUES} | self._left
        rows, seen = dict(self._made), set()
        for node in packing.own_tensors(self.pair):
            if storage_of(node) not in seen and node.name not in self._payload:
                why = reasons.get(node.name) or self._reasons.get(storage_of(node), packing.VALUES)
                rows[node.name] = packing.described(node, "dense", storage_bytes(node), why)
            seen.add(storage_of(node))
        for storage, node in self._plain.items():
            if storage not in seen and node.name not in rows:
                rows[node.name] = packing.described(node, self._gone[0], 0, self._gone[1])
        nodes = *self._plain.values(), *packing.own_tensors(self.pair)
        plain, saved = {n.name for n in nodes if storage_of(n) in self._plain}, {n.name for n in self._saved}
        why = {name: row.reason if name in saved else f"kept for rebuilds: {row.reason}" for name, row in rows.items()}
        return [r if n in plain else replace(r, plain_bytes=0, reason=why[n]) for n, r in rows.items()]

    def _exact_moves(self) -> Iterator[Callable[[], None]]:
        touched = {node for cone in self._cones for node in (cone.root, *cone.leaves)}
        yield from (partial(self._encode, c) for c in packing.choices(self.pair) if c.node not in touched)
        yield from (partial(self._rebuild, cone) for cone in self._cones)
        self.pair.drop_unread()
        yield from (partial(self._encode, c) for c in packing.choices(self.pair))

    def _narrow_moves(self) -> Iterator[Callable[[], None]]:
        found = packing.choices(self.pair, self._rounding) if self._rounding else []
        yield from (partial(self._encode, c) for c in sorted(found, key=lambda c: -storage_bytes(c.node)))

    def _rebuild(self, cone: edit.Cone) -> None:
        if not self.pair.is_saved(cone.root):
            return
        if self.settings.exact:
            edit.rebuild(self.pair, cone)
        else:
            rebuild_late(self.pair, cone, self.settings.lossy is not None)
        why = f"computed anew from {', '.join(leaf.name for leaf in cone.leaves[:3])}"
        self._made[cone.root.name] = packing.described(cone.root, "rebuild", 0, why)

    def _encode(self, choice: packing.Choice) -> None:
        node, form = choice.node, choice.form
        if form is None or not self.pair.is_saved(node):
            return
        if isinstance(form, Bits) and self._last:
            form = form.laid_out(value(node))
        materialise = True if self.settings.exact else False if isinstance(form, Bits) else None
        payload = edit.encode(self.pair, node, form, materialise)
        self._payload.update(part.name for part in payload)
        kept = sum(map(storage_bytes, payload))
        self._made[node.name] = packing.described(node, form.name, kept, choice.reason)


@cache
def sources() -> str:
    """A digest of the code that cuts graphs: those in PyTorch's caches hold for the code that cut them."""
    here = Path(__file__).parent
    code = b"".join(path.read_bytes() for path in sorted([*here.rglob("*.py"), *here.parent.glob("planning/*.py")]))
    return hashlib.sha256(VERSION.encode() + code).hexdigest()


def _within_budget(plain: Moves, made: Callable[[Sequence[Segment]], Moves]) -> Moves:
    """The moves that meet the budget; where they are too few and bits may differ, those of ``made``, with as few
    segments run again as it needs. Raises BudgetError."""
    moves, settings = plain, plain.settings
    budget_bytes = parse_budget(settings.budget, plain.plain_peak_bytes) or 0  # there is one
    peaks = plain.within(budget_bytes)
    kind, least = peaks.popitem()
    divisions = [] if settings.exact or least <= budget_bytes else recompute.divisions(plain.pair, plain.rows())
    if found := fewest(divisions, lambda s: made(s).all(), Moves.peak, budget_bytes, least):
        moves, least = found.made, min(least, found.peak_bytes)
        moves.notes.append(f"backward runs {found.count} segments of forward again")
    moves.met(budget_bytes, peaks | {kind: least})
    return moves


def cut(joint_graph: fx.GraphModule, inputs: Sequence[object], settings: Settings, **words: Any) -> compat.Graphs:
    """The graphs of forward and backward, cut as PyTorch cuts them, with what crosses in fewer bytes. ``words`` are
    those of PyTorch's partitioner. The record goes to :func:`gistkit.compiled.record.collected`."""
    count = 0 if settings.exact else pools.rewritten(joint_graph)
    static = tuple(words.get("static_lifetime_input_indices") or ())
    pair = Pair(*compat.min_cut(joint_graph, inputs, **words), words["num_fwd_outputs"])
    before = pair if settings.exact or settings.budget is None else recompute.rerun(pair, ())  # no moves on it
    with ExitStack() as stack:
        if not gc.get_freeze_count():  # collections of garbage leave out what was there before, many objects
            gc.freeze()
            stack.callback(gc.unfreeze)
        plain = Moves(pair, settings, static)
        if settings.budget is None:
            moves = plain.all()
        else:
            moves = _within_budget(plain, lambda s: Moves(recompute.rerun(before, s), settings, static, plain))
    pair, rows = moves.pair, moves.rows()
    moves.finish()
    done, notes = (("operands of which backward reads only the shape", count),) if count else (), tuple(moves.notes)
    record.write(GraphRecord(tuple(rows), done, notes, moves.predicted(), moves.plain_peak_bytes))
    return pair.forward, pair.backward
