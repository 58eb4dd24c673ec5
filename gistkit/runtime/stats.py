"""What one step really kept: pure data, made when a compressed forward ends."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gistkit.runtime.program import Program
from gistkit.runtime.region import Region

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
    """One forward of a compressed model: a row a kept thing, and the totals in bytes.

    ``plain_bytes`` is what plain PyTorch keeps for backward (None where the forward was never captured),
    ``predicted_bytes`` the plan's forecast, ``kept_bytes`` what was held when the forward ended; parameters left out.
    """

    rows: tuple[Row, ...]
    plain_bytes: int | None
    predicted_bytes: int | None
    kept_bytes: int
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The stats as JSON text."""
        return json.dumps(asdict(self))


def payload_bytes(kept: Any) -> int:
    """Bytes that a node's own hold really keeps: the distinct storages of its tensors."""
    encoded = getattr(kept, "encoded", None)
    if encoded is not None:
        return int(encoded.nbytes)
    found: dict[int, int] = {}
    pending = [kept]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            found[storage._cdata] = storage.nbytes()
        elif isinstance(item, (tuple, list)):
            pending.extend(item)
        elif hasattr(item, "__dict__"):
            pending.extend(vars(item).values())
    return sum(found.values())


def collect(region: Region, program: Program | None) -> StepStats:
    """The stats of a forward that has just ended; the region is not yet cleared."""
    rows = [
        _row(program, s.storage, s.codec, s.plain_bytes, s.nbytes, region.notes.get(s.storage, s.reason))
        for s in region.table.stashes()
    ]
    for held in region.held.values():
        if not held.ref.expired():
            rows.append(_row(program, held.storage, "dense", held.nbytes, held.nbytes, held.reason))
    for index, op, kept in region.own:
        module, nbytes = program.module(index) if program else "", payload_bytes(kept)
        if nbytes:
            rows.append(Row(-1, op, module, (), OWN_CODECS[op], 0, nbytes, "what its own backward needs"))
    known = program is not None
    notes = (f"the forward left its plan: {region.diverged}",) if region.diverged else ()
    return StepStats(
        tuple(rows),
        program.plan.plain_bytes if known else None,
        program.plan.kept_bytes if known else None,
        sum(r.kept_bytes for r in rows),
        notes,
    )


def _row(program: Program | None, storage: int, codec: str, plain: int, kept: int, reason: str) -> Row:
    op, module, shape = program.origin(storage) if program else ("", "", ())
    return Row(storage, op, module, shape, codec, plain, kept, reason)
