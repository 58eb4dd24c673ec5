"""What a compressed model did in its last step: a table of every kept tensor, predicted and measured, with the
reasons."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from gistkit.errors import CompressError
from gistkit.runtime.attach import compressed_forward
from gistkit.runtime.stats import Row, StepStats

MIB = 2**20
SHOWN = 40


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.2f}"


@dataclass(frozen=True)
class Report:
    """The last training forward of a compressed model. ``str()`` gives tables; ``stats`` the data behind them.

    ``stats`` is None before the first training forward.
    """

    stats: StepStats | None
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Bytes that plain PyTorch keeps over bytes kept here; None where plain was not captured."""
        if self.stats is None or not self.stats.plain_bytes or not self.stats.kept_bytes:
            return None
        return self.stats.plain_bytes / self.stats.kept_bytes

    def __str__(self) -> str:
        console = Console(width=150, record=True, file=None, quiet=True)
        with console.capture() as captured:
            console.quiet = False
            for part in self._parts():
                console.print(part)
        return captured.get()

    def _parts(self) -> list:
        if self.stats is None:
            return ["no training forward yet", *self.notes]
        return [self._table(self.stats.rows), self._totals(self.stats), *self.stats.notes, *self.notes]

    @staticmethod
    def _table(rows: tuple[Row, ...]) -> Table:
        table = Table(title="kept for backward, largest first")
        for name in ("module", "op", "shape", "codec"):
            table.add_column(name)
        for name in ("plain MiB", "kept MiB"):
            table.add_column(name, justify="right")
        table.add_column("why")
        ordered = sorted(rows, key=lambda r: -max(r.plain_bytes, r.kept_bytes))
        for r in ordered[:SHOWN]:
            shape = "x".join(map(str, r.shape))
            table.add_row(r.module, r.op, shape, r.codec, _mib(r.plain_bytes), _mib(r.kept_bytes), r.reason)
        rest = ordered[SHOWN:]
        if rest:
            plain, kept = sum(r.plain_bytes for r in rest), sum(r.kept_bytes for r in rest)
            table.add_row(f"{len(rest)} smaller ones", "", "", "", _mib(plain), _mib(kept), "all in report.stats.rows")
        return table

    def _totals(self, stats: StepStats) -> str:
        kept = f"kept {stats.kept_bytes / MIB:.2f} MiB"
        if stats.plain_bytes is None or stats.predicted_bytes is None:
            return kept
        text = (
            f"{kept}, predicted {stats.predicted_bytes / MIB:.2f} MiB, plain PyTorch {stats.plain_bytes / MIB:.2f} MiB"
        )
        gain = "" if self.ratio is None else f": {self.ratio:.2f}x"
        if self.ratio is not None and self.ratio < 1.05:
            gain += " - nothing gained; the column 'why' says for each tensor what stands in the way"
        return text + gain


def report(model: torch.nn.Module) -> Report:
    """The report of a compressed model's last training forward. Raises CompressError where it is not compressed.

    Does not synchronise with a device; on CUDA, sparse encodings whose size has not arrived yet count with their
    scratch.
    """
    stand_in = compressed_forward(model)
    if stand_in is None:
        raise CompressError("report: the model is not compressed; call gistkit.compress(model) first")
    engine = stand_in.engine
    return Report(engine.stats, tuple(engine.notes))


__all__ = ["Report", "report"]
