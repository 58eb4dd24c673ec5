"""The partitioner that Inductor calls: joint rewrites, PyTorch's own min-cut, then edits of what crosses."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch import fx

from gistkit.compiled import compat, pools, record
from gistkit.compiled.memory import predicted_peak
from gistkit.compiled.moves import Moves, Settings, same_kernels
from gistkit.compiled.split import Pair
from gistkit.version import VERSION


@cache
def sources() -> str:
    """A digest of this room's code: graphs in PyTorch's caches hold for the code that cut them."""
    digest = hashlib.sha256(VERSION.encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cut(
    joint_graph: fx.GraphModule, inputs: Sequence[object], settings: Settings, **words: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The graphs of forward and backward, cut as PyTorch cuts them, with what crosses in fewer bytes. ``words`` are
    those of PyTorch's partitioner. The record goes to :func:`gistkit.compiled.record.collected`."""
    rewrites = {} if same_kernels(settings, joint_graph) else pools.rewritten(joint_graph)
    pair = Pair(*compat.min_cut(joint_graph, inputs, **words), words["num_fwd_outputs"])
    moves = Moves(pair, settings, tuple(words.get("static_lifetime_input_indices") or ()))
    if settings.budget is None:
        moves.all()
    else:
        moves.within(settings.budget)
    rows = moves.rows()
    moves.finish()
    done = tuple((name, count) for name, count in rewrites.items() if count)
    peaks = predicted_peak(pair), moves.plain_peak_bytes
    record.write(record.GraphRecord(tuple(rows), done, tuple(moves.notes), *peaks))
    return pair.forward, pair.backward
