"""What a compressed model did in its last step, what compiled steps keep: tables of every kept tensor with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from gistkit.compiled import records_of, records_of_traced
from gistkit.errors import CompressError
from gistkit.ir import GraphRecord, Kept
from gistkit.report.tables import hundredths, kept_table, rendered
from gistkit.runtime import Denser, StepStats, compressed_forward, denser

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
        return tuple(dict.fromkeys(note for graph in self.graphs for note in graph.notes))

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
        columns = {"storage": "name", "made by": "op", "shape": "shape", "dtype": "dtype", "form": "form"}
        title = "kept for backward by compiled graphs, largest first"
        shown = kept_table(title, columns, self.rows, "report.rows")
        return rendered([shown, self._totals(), *rewrites, *self.notes], WIDTH)

    def _totals(self) -> str:
        ratio = "" if self.ratio is None else f": {self.ratio:.2f}x"
        return (
            f"kept {hundredths(self.kept_bytes)} MiB in {len(self.graphs)} graph(s), torch.compile "
            f"{hundredths(self.plain_bytes)} MiB{ratio}; predicted peak of a step {hundredths(self.peak_bytes)} MiB, "
            f"torch.compile {hundredths(max(g.plain_peak_bytes for g in self.graphs))} MiB"
        )


@dataclass(frozen=True)
class BudgetReport:
    """What a plan promises of a step's peak, and what is known of the real one; all in bytes, everything counted.

    ``predicted_bytes`` is the plan's peak. ``measured_bytes`` is the most that the CUDA allocator has handed out since
    ``torch.cuda.reset_peak_memory_stats``, of this model or not; None on a CPU, which counts nothing by itself
    (``gistkit.LiveBytes`` does). ``denser`` are the storages that had more non-zeros in a step than planned for, with
    densities and payload bytes planned and measured. ``hardware``: what was planned for, and where its rates are from.
    """

    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int | None
    denser: tuple[Denser, ...]
    hardware: str

    @property
    def excess_bytes(self) -> int:
        """What the denser payloads take more than planned."""
        return sum(d.excess_bytes for d in self.denser)

    def lines(self) -> list[str]:
        """The same in words."""
        measured = "" if self.measured_bytes is None else f", measured {hundredths(self.measured_bytes)} MiB"
        predicted = f"budget {hundredths(self.budget_bytes)} MiB, predicted peak {hundredths(self.predicted_bytes)} MiB"
        lines = [predicted + measured, f"planned for {self.hardware}"]
        if self.denser:
            d = self.denser[0]
            lines.append(
                f"{len(self.denser)} storages have fewer zeros than planned for (storage {d.storage}: density "
                f"{d.measured:.3f}, planned {d.planned:.3f}; {d.measured_bytes} bytes, planned {d.planned_bytes}): "
                f"their payloads take up to {self.excess_bytes} bytes more than planned; plan again with "
                "density=gistkit.report(model).densities"
            )
        return lines


@dataclass(frozen=True)
class Report:
    """The last training forward of a compressed model. ``str()`` gives tables; ``stats`` the data behind them.

    ``stats`` is None before the first training forward. ``densities`` are the shares of non-zero elements that its
    steps measured, by storage: what :func:`gistkit.plan` takes as ``density``. ``budget``: under a plan with one.
    """

    stats: StepStats | None
    notes: tuple[str, ...] = ()
    densities: Mapping[int, float] = field(default_factory=dict)
    budget: BudgetReport | None = None

    @property
    def kept_bytes(self) -> int | None:
        """What the forward kept for backward; None before the first one."""
        return None if self.stats is None else self.stats.kept_bytes

    @property
    def plain_kept_bytes(self) -> int | None:
        """What plain PyTorch keeps; None where it was not captured."""
        return None if self.stats is None else self.stats.plain_bytes

    @property
    def ratio(self) -> float | None:
        """Bytes that plain PyTorch keeps over bytes kept here; None where plain was not captured."""
        if self.stats is None or not self.stats.plain_bytes or not self.stats.kept_bytes:
            return None
        return self.stats.plain_bytes / self.stats.kept_bytes

    def __str__(self) -> str:
        promise = [] if self.budget is None else self.budget.lines()
        stats, parts = self.stats, ["no training forward yet", *promise]
        if stats is not None:
            columns = {name: name for name in ("module", "op", "shape", "codec")}
            shown = kept_table("kept for backward, largest first", columns, stats.rows, "report.stats.rows")
            parts = [shown, self._totals(stats), *promise, *stats.notes]
        return rendered([*parts, *self.notes], WIDTH)

    def _totals(self, stats: StepStats) -> str:
        kept = f"kept {hundredths(stats.kept_bytes)} MiB"
        if stats.plain_bytes is None or stats.predicted_bytes is None:
            return kept
        plain = hundredths(stats.plain_bytes)
        text = f"{kept}, predicted {hundredths(stats.predicted_bytes)} MiB, plain PyTorch {plain} MiB"
        gain = "" if self.ratio is None else f": {self.ratio:.2f}x"
        if self.ratio is not None and self.ratio < 1.05:
            gain += " - nothing gained; the column 'why' says for each tensor what stands in the way"
        return text + gain


def report(model: torch.nn.Module) -> Report | CompiledReport:
    """The report of a compressed model's last training forward: every kept tensor, its form, its bytes and why. Of a
    model that was compiled with gistkit, the same for the graphs that it was compiled to. Of what wraps one compressed
    model, as ``torch.compile`` does, that model's.

    Example: ``print(gistkit.report(model))``. Never waits for a device. On CUDA a sparse payload counts with its
    forecast size, or its scratch without one, until its size arrives. Raises CompressError where the model is neither.
    """
    stand_in = compressed_forward(model)
    if stand_in is None:
        graphs = records_of(model)
        if graphs is not None:
            return CompiledReport(tuple(graphs))
        parts = [part for part in model.modules() if compressed_forward(part) is not None]
        if len(parts) == 1:
            return report(parts[0])
        if parts:
            raise CompressError(
                f"report: model must be compressed as a whole, got one with {len(parts)} compressed parts; report each"
            )
        raise CompressError("report: the model is not compressed; call gistkit.compress(model) first")
    engine = stand_in.engine
    if engine.stats is None and (graphs := records_of_traced(stand_in)) is not None:
        return CompiledReport(tuple(graphs))
    about, plan = (engine.stats, tuple(engine.all_notes), engine.densities), engine.plan
    if plan is None or plan.budget_bytes is None:
        return Report(*about)
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    promise = BudgetReport(
        plan.budget_bytes,
        plan.peak_bytes,
        torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        denser(plan, engine.densities, engine.storages),
        f"{plan.hardware} (rates: {plan.prediction.rates})" if plan.prediction.rates else plan.hardware,
    )
    return Report(*about, promise)
