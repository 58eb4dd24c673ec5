"""What one step really kept: pure data. When a forward ends only the bytes are read (:func:`observe`), for they change
later; names and reasons are looked up when somebody asks for the stats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from gistkit.nn.keep import Away
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.program.program import Program

BY_PYTORCH = "PyTorch's own operators run; its size as captured"
OWN_CODECS = {"relu": "mask1", "dropout": "mask1", "max_pool2d": "argmax", "batch_norm": "dense"}


@dataclass(frozen=True)
class Row:
    """One storage, or one node's own payload: where it came from, how it is kept, bytes plain and kept, why."""

    storage: int
    op: str
    module: str
    shape: tuple[int, ...]
    codec: str
    plain_bytes: int
    kept_bytes: int
    reason: str


@dataclass(frozen=True)
class StepStats:
    """One forward of a compressed model: a row a kept thing, and the totals in bytes. ``plain_bytes`` is what plain
    PyTorch keeps for backward (None where the forward was never captured), ``predicted_bytes`` the plan's forecast,
    ``kept_bytes`` what was held when the forward ended; parameters left out."""

    rows: tuple[Row, ...]
    plain_bytes: int | None
    predicted_bytes: int | None
    kept_bytes: int
    notes: tuple[str, ...] = ()


def payload_bytes(kept: Any) -> int:
    """Bytes that a node's own hold keeps: the distinct storages of its tensors."""
    if isinstance(kept, torch.Tensor):
        return kept.untyped_storage().nbytes()
    if isinstance(kept, Away):
        return 0
    if isinstance(kept, (tuple, list)):
        storages = (t.untyped_storage() for t in kept if isinstance(t, torch.Tensor))
        return sum({s._cdata: s.nbytes() for s in storages}.values())
    encoded = getattr(kept, "encoded", kept)
    return int(encoded.nbytes)


@dataclass(frozen=True)
class Observed:
    """The bytes of a forward that has just ended; ``found``: (planned id, codec, plain bytes, kept bytes, reason) of
    what was stashed or recorded; ``notes``: why else something is kept as it is, by planned id."""

    program: Program | None
    found: list[tuple[int, str, int, int, str]]
    own: list[tuple[int, str, int]] = field(default_factory=list)
    notes: dict[int, str] = field(default_factory=dict)
    diverged: str = ""

    @property
    def storages(self) -> list[tuple[int, str, int, int, str]]:
        """Rows as those found, with what stays dense by the capture."""
        met = {row[0] for row in self.found}
        dense = () if self.program is None else self.program.dense_storages
        return self.found + [(s, "dense", n, n, self.notes.get(s, why)) for s, n, why in dense if s not in met]

    def stats(self) -> StepStats:
        program, plan = self.program, None if self.program is None else self.program.plan
        rows = []
        for storage, codec, plain, kept, reason in self.storages:
            origin = program.origin(storage) if program else ("", "", ())
            rows.append(Row(storage, *origin, codec, plain, kept, reason))
        for index, op, nbytes in self.own:
            if nbytes:
                module = program.covered[index].module if program else ""
                rows.append(Row(-1, op, module, (), OWN_CODECS[op], 0, nbytes, "what its own backward needs"))
        return StepStats(
            tuple(rows),
            None if plan is None else plan.plain_bytes,
            None if plan is None else plan.kept_bytes,
            sum(r.kept_bytes for r in rows),
            (f"the forward left its plan: {self.diverged}; only gistkit's part of it counts",) if self.diverged else (),
        )


def observe(state: ForwardState) -> Observed:
    """What a forward that has just ended keeps, before its state is cleared. Holds no tensors."""
    notes, stashes, dense = state.notes, state.table.stashes, state.dense.values()
    found = [(s.storage, s.codec, s.plain_bytes, s.body.nbytes, notes.get(s.storage, s.reason)) for s in stashes]
    found += [(d.storage, "dense", d.nbytes, d.nbytes, d.reason) for d in dense if not d.ref.expired()]
    own = [(i, op, payload_bytes(kept)) for i, op, kept in state.own]
    return Observed(state.program, found, own, notes, state.diverged)


def as_captured(program: Program) -> Observed:
    """What a forward keeps that PyTorch carried out, by its capture."""
    why = {} if program.runs_plain else {s: reason for s, _, reason in program.dense_storages}
    anew = {d.storage: d for d in program.plan.decisions} if program.plan.modules else {}
    kept = []
    for s in program.graph.kept():
        d = anew.get(s.id)
        about = (
            ("dense", s.nbytes, s.nbytes, why.get(s.id) or BY_PYTORCH)
            if d is None
            else (d.codec, s.nbytes, 0, d.reason)
        )
        kept.append((s.id, *about))
    return Observed(program, kept)
