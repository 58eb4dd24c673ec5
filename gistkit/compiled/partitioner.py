"""The partitioner that Inductor calls: joint rewrites, PyTorch's own min-cut, then edits of what crosses."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import fx

from gistkit.compiled import compat, joint, packing, record
from gistkit.compiled.split import Pair
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


class Partitioner(compat.partitioner_base()):
    """Cuts a joint graph as PyTorch does, and keeps what crosses in fewer bytes.

    Give it to ``torch.compile(options={"custom_partitioner_fn": Partitioner(Settings())})``, or let
    :func:`gistkit.compile` do it, which also collects what was decided.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def uuid(self) -> Any:
        """What PyTorch's caches of compiled graphs tell partitioners apart by."""
        return sources(), repr(self.settings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Partitioner) and other.settings == self.settings

    def __hash__(self) -> int:
        return hash(self.settings)

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """(forward, backward)."""
        rewrites = joint.rewritten(gm)
        pair = Pair(*compat.min_cut(gm, joint_inputs, **kwargs), kwargs["num_fwd_outputs"])
        rows = packing.pack(pair)
        pair.finish()
        record.write(record.GraphRecord(tuple(rows), tuple((k, n) for k, n in rewrites.items() if n)))
        return pair.forward, pair.backward
