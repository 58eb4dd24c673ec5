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


def cut(
    joint_graph: fx.GraphModule, inputs: Sequence[object], settings: Settings, **words: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The graphs of forward and backward, cut as PyTorch cuts them, with what crosses in fewer bytes. ``words`` are
    those of PyTorch's partitioner. The record goes to :func:`gistkit.compiled.record.collected`."""
    rewrites = joint.rewritten(joint_graph)
    pair = Pair(*compat.min_cut(joint_graph, inputs, **words), words["num_fwd_outputs"])
    rows = packing.pack(pair)
    pair.finish()
    record.write(record.GraphRecord(tuple(rows), tuple((k, n) for k, n in rewrites.items() if n)))
    return pair.forward, pair.backward
