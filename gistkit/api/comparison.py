"""What ``gistkit plan`` shows: one plan by storage, and every policy beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from gistkit.api.planning import plan_graph
from gistkit.errors import BudgetError, PlanError
from gistkit.ir import Plan, SavedGraph
from gistkit.planning import accepts
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import held, kept_bytes
from gistkit.planning.policies import POLICIES
from gistkit.report import mib, milliseconds, table

SHOWN = 40


@dataclass(frozen=True)
class Row:
    """One policy under the budget: its plan, or the ``error`` of one that has none, in a word the ``note``.

    ``fits`` tells whether its peak is within the budget; a policy that aims at no budget is shown either way.
    """

    policy: str
    plan: Plan | None
    fits: bool
    note: str = ""
    error: BudgetError | PlanError | None = None


def compare(graph: SavedGraph, costs: CostTable, budget_bytes: int | None, words: Mapping) -> list[Row]:
    """Every policy under the same budget, in the order of the registry; ``words`` are the settings of
    :func:`gistkit.api.planning.plan_graph`, of which each policy takes what it knows."""
    return [_row(name, graph, costs, budget_bytes, words) for name in POLICIES]


def _row(name: str, graph: SavedGraph, costs: CostTable, budget_bytes: int | None, words: Mapping) -> Row:
    given = dict(words)
    if words["lossy"] is not None and not accepts(name, "lossy"):
        given |= {"lossy": None, "fidelity": "reassociated"}
    try:
        made = plan_graph(graph, costs, budget=budget_bytes, policy=name, refuse=False, **given)
    except BudgetError as error:
        least = error.least_bytes.get("lossy" if given["lossy"] else given["fidelity"], 0)
        return Row(name, None, False, f"needs {mib(least)}" if least else "refused", error)
    except PlanError as error:
        if costs.hardware.has_link:
            raise
        return Row(name, None, False, "needs a link", error)
    fits = budget_bytes is None or made.peak_bytes <= budget_bytes
    return Row(name, made, fits, "" if fits else "above the budget")


def policies_table(rows: Sequence[Row], budget_bytes: int | None, batch_norm: bool = False) -> Table:
    """Predicted peak and time of every policy; ``batch_norm`` says that sub-batches would change statistics."""
    limit = "no budget" if budget_bytes is None else f"budget {mib(budget_bytes)} MiB"
    several = any(row.plan is not None and row.plan.sub_batches > 1 for row in rows)
    caption = "beside plain PyTorch" + ("; /2: in two sub-batches" if several else "")
    caption += ", * with other statistics of the batch norms" if several and batch_norm else ""
    columns = ("policy", ">peak MiB", ">ms/step", ">slower", "class", "fits")
    shown = table(f"policies, {limit}", *columns, caption=caption)
    plain = next(r.plan for r in rows if r.policy == "plain")
    assert plain is not None
    for row in rows:
        made = row.plan
        if made is None:
            shown.add_row(row.policy, row.note, "-", "-", "-", "no")
            continue
        peak = f"{mib(made.peak_bytes)} ({made.peak_bytes / plain.peak_bytes:.0%})"
        parts = "" if made.sub_batches == 1 else f" /{made.sub_batches}{'*' if batch_norm else ''}"
        slower = f"{made.step_s / plain.step_s - 1:+.1%}"
        fits = "yes" if row.fits else "no"
        shown.add_row(row.policy, peak, milliseconds(made.step_s), slower, made.fidelity + parts, fits)
    return shown


def decisions_table(graph: SavedGraph, costs: CostTable, made: Plan, wide: bool = True) -> Table:
    """A plan's decision for every kept storage, largest first; ``wide``: with the reason for it."""
    title = f"{made.policy}: what becomes of the tensors kept for backward, largest first"
    shown = table(title, "tensor", "shape", "kept as", ">plain MiB", ">kept MiB")
    if wide:
        shown.add_column("why")
    decided = {d.storage: d for d in made.decisions}
    blocks = sorted((b for b in held(graph) if b.storage >= 0), key=lambda b: -b.nbytes)
    kept = {b.id: kept_bytes(b, decided.get(b.storage), costs) for b in blocks}
    for block in blocks[:SHOWN]:
        decision, storage = decided.get(block.storage), graph.storages[block.storage]
        why, form = "nothing decided", "dense"
        if decision:
            why = decision.reason
            form = decision.codec + " + mask1" * decision.mask + " on the host" * decision.on_host
        last = graph.writers(storage.id)[-1:]
        maker = f"{last[0].module} {last[0].op}".strip() if last else storage.kind
        shape, sizes = "x".join(map(str, storage.shape)), (mib(block.nbytes), mib(kept[block.id]))
        shown.add_row(maker, shape, form, *sizes, *[why] * wide)
    rest = blocks[SHOWN:]
    if rest:
        sums = (sum(b.nbytes for b in rest), sum(kept[b.id] for b in rest))
        shown.add_row(f"{len(rest)} smaller ones", "", "", *map(mib, sums), *["in --json"] * wide)
    return shown
