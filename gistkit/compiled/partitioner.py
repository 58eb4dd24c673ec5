"""The partitioner that Inductor calls: joint rewrites, PyTorch's own min-cut, then edits of what crosses."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import fx

from gistkit.compiled import compat, joint, lossy, packing, record
from gistkit.compiled.rebuilding import rebuild_saved
from gistkit.compiled.rebuilds import Limits
from gistkit.compiled.split import Pair, storage_bytes, storage_of
from gistkit.version import VERSION


@dataclass(frozen=True)
class Settings:
    """What the caller asked for, as compiled graphs take it."""

    lossy: str | None = None
    fidelity: str = "bitwise"
    budget_bytes: int | None = None


@cache
def sources() -> str:
    """A digest of this room's code: graphs in PyTorch's caches hold for the code that cut them."""
    digest = hashlib.sha256(VERSION.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cut(
    joint_graph: fx.GraphModule, inputs: Sequence[object], settings: Settings, **words: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The graphs of forward and backward, cut as PyTorch cuts them, with what crosses in fewer bytes. ``words`` are
    those of PyTorch's partitioner. The record goes to :func:`gistkit.compiled.record.collected`."""
    rewrites = joint.rewritten(joint_graph)
    pair = Pair(*compat.min_cut(joint_graph, inputs, **words), words["num_fwd_outputs"])
    static = list(words.get("static_lifetime_input_indices") or ())
    rows = edited(pair, settings, static)
    pair.finish()
    record.write(record.GraphRecord(tuple(rows), tuple((k, n) for k, n in rewrites.items() if n)))
    return pair.forward, pair.backward


def edited(pair: Pair, settings: Settings, static_inputs: Sequence[int] = ()) -> list[record.Kept]:
    """Carry out rebuilds and encodings on a pair; :meth:`Pair.finish` is the caller's. A row for every storage that
    plain torch.compile keeps, or that is kept here in addition."""
    plain = {storage_of(node): node for node in reversed(packing.own_tensors(pair))}
    exact = settings.fidelity == "bitwise" and settings.lossy is None
    limits = Limits(bitwise=exact)
    choice = rebuild_saved(pair, static_inputs, limits, materialise=True if exact else None)
    pair.drop_unread()
    rounding = None
    if settings.lossy is not None:
        channels_last = compat.prefers_channels_last(pair.forward)
        rounding = packing.Rounding(settings.lossy, lossy.of_parameters(pair, static_inputs), channels_last)
    left = {storage_of(node) for node in packing.own_tensors(pair)}
    names = {node.name for node in plain.values()}
    cones = {cone.root: cone for cone in choice.cones}
    rows = []
    for row in packing.pack(pair, rounding):
        extra = row.name not in names
        rows.append(replace(row, plain_bytes=0, reason=f"kept for rebuilds: {row.reason}") if extra else row)
    for storage, node in plain.items():
        if storage not in left:
            cone = cones.get(node.name)
            why = "nothing reads it any more" if cone is None else f"computed anew from {', '.join(cone.leaves[:3])}"
            rows.append(packing.described(node, "rebuild", storage_bytes(node), 0, why))
    return rows
