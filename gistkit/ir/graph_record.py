"""What the compiled path decided for one graph: pure data, for the report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kept:
    """One storage that plain ``torch.compile`` would keep for backward: by whom it is made, its form here, bytes before
    and after, and why."""

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    form: str
    plain_bytes: int
    kept_bytes: int
    reason: str


@dataclass(frozen=True)
class GraphRecord:
    """One graph: its storages, rewrites before the cut with their counts, and the predicted peak of its step in bytes,
    with the same for the cut before the moves."""

    rows: tuple[Kept, ...]
    rewrites: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()
    peak_bytes: int = 0
    plain_peak_bytes: int = 0

    @property
    def plain_bytes(self) -> int:
        """Bytes between forward and backward without gistkit, for the same cut."""
        return sum(row.plain_bytes for row in self.rows)

    @property
    def kept_bytes(self) -> int:
        """Bytes between forward and backward."""
        return sum(row.kept_bytes for row in self.rows)
