"""What the compiled steps of a model keep for backward: a table of every storage, with the reasons."""

from __future__ import annotations

from dataclasses import dataclass

from gistkit.compiled import GraphRecord, Kept
from gistkit.report.tables import hundredths, kept_table, rendered

WIDTH = 150
NOTHING = (
    "no training step has been compiled yet, or PyTorch's caches had its graphs and no record of them is left; "
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 compiles them anew"
)


@dataclass(frozen=True)
class CompiledReport:
    """The graphs that a compiled model has been compiled to. ``str()`` gives a table; ``graphs`` the data behind it.

    Bytes are those of the sizes at compile time. ``plain_bytes`` is what PyTorch's own cut of the same graphs keeps.
    """

    graphs: tuple[GraphRecord, ...]

    @property
    def plain_bytes(self) -> int:
        """Bytes that the graphs would keep for backward under torch.compile."""
        return sum(g.plain_bytes for g in self.graphs)

    @property
    def kept_bytes(self) -> int:
        """Bytes that the graphs keep for backward."""
        return sum(g.kept_bytes for g in self.graphs)

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of a step, of the graph that needs most: parameters, buffers, batch, gradients and buffers
        of the graphs; the optimiser's states and workspace of libraries are not in it."""
        return max((g.peak_bytes for g in self.graphs), default=0)

    @property
    def plain_kept_bytes(self) -> int:
        """As ``plain_bytes``, by the name that :class:`gistkit.Report` has for it."""
        return self.plain_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        """What there is to know besides, of every graph."""
        return tuple(note for graph in self.graphs for note in graph.notes)

    @property
    def rows(self) -> tuple[Kept, ...]:
        """Every kept storage of every graph."""
        return tuple(row for graph in self.graphs for row in graph.rows)

    @property
    def ratio(self) -> float | None:
        """Bytes under torch.compile over bytes here; None where nothing is kept."""
        return self.plain_bytes / self.kept_bytes if self.kept_bytes else None

    def __str__(self) -> str:
        if not self.graphs:
            return rendered([NOTHING], WIDTH)
        done: dict[str, int] = {}
        for name, count in (item for graph in self.graphs for item in graph.rewrites):
            done[name] = done.get(name, 0) + count
        rewrites = [f"rewritten before the cut: {', '.join(f'{n} {name}' for name, n in done.items())}"] if done else []
        columns = ("storage", "made by", "shape", "dtype", "form")
        title = "kept for backward by compiled graphs, largest first"
        shown = kept_table(title, columns, self.rows, _cells, "report.rows")
        return rendered([shown, self._totals(), *rewrites, *self.notes], WIDTH)

    def _totals(self) -> str:
        ratio = "" if self.ratio is None else f": {self.ratio:.2f}x"
        return (
            f"kept {hundredths(self.kept_bytes)} MiB in {len(self.graphs)} graph(s), torch.compile "
            f"{hundredths(self.plain_bytes)} MiB{ratio}; predicted peak of a step {hundredths(self.peak_bytes)} MiB, "
            f"torch.compile {hundredths(max(g.plain_peak_bytes for g in self.graphs))} MiB"
        )


def _cells(r: Kept) -> tuple[str, ...]:
    return r.name, r.op, "x".join("?" if d < 0 else str(d) for d in r.shape), r.dtype, r.form
