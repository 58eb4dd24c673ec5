"""What ``gistkit plan`` shows: one plan by storage, every policy beside it, and the least budget of each class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from gistkit.api.planning import plan_graph
from gistkit.errors import BudgetError, PlanError
from gistkit.ir import Decision, Plan, SavedGraph
from gistkit.planning import accepts
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import held, kept_bytes
from gistkit.planning.policies import POLICIES
from gistkit.report import mib, milliseconds, table

SHOWN = 40
WHY = 34
"""Columns that the reasons of the decisions need at least."""


@dataclass(frozen=True)
class Row:
    """One policy under the budget: its plan, or why it has none.

    ``fits`` tells whether its peak is within the budget; a policy that aims at no budget is shown either way.
    ``needs_bytes`` is that peak, or the least that the policy can do with in the class of moves that was asked for.
    ``refusal`` is the error of one that has no plan on the hardware, whatever the budget; ``note`` that in a word.
    """

    policy: str
    plan: Plan | None
    fits: bool
    needs_bytes: int
    note: str = ""
    refusal: str = ""


def compare(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None,
    words: Mapping,
    done: Callable[[str], None] = lambda name: None,
) -> list[Row]:
    """Every policy under the same budget, in the order of the registry; ``words`` are the settings of
    :func:`gistkit.api.planning.plan_graph`, of which each policy takes what it knows. ``done`` hears of each one's
    end."""
    rows = []
    for name in POLICIES:
        rows.append(_row(name, graph, costs, budget_bytes, words))
        done(name)
    return rows


def _row(name: str, graph: SavedGraph, costs: CostTable, budget_bytes: int | None, words: Mapping) -> Row:
    given = dict(words) if accepts(name, "lossy") else {**words, "lossy": None, "fidelity": _without_lossy(words)}
    try:
        made = plan_graph(graph, costs, budget=budget_bytes, policy=name, refuse=False, **given)
    except BudgetError as error:
        asked = given["fidelity"] if given["lossy"] is None else "lossy"
        least = error.least_bytes.get(asked, 0)
        refusal = str(error) if budget_bytes is None else ""  # then the device's memory was the limit
        return Row(name, None, False, least, f"needs {mib(least)}" if least else "refused", refusal)
    except PlanError as error:
        if costs.hardware.has_link:
            raise
        return Row(name, None, False, 0, "needs a link", str(error))
    fits = budget_bytes is None or made.peak_bytes <= budget_bytes
    return Row(name, made, fits, made.peak_bytes, "" if fits else "above the budget")


def _without_lossy(words: Mapping) -> str:
    return "reassociated" if words["lossy"] is not None else words["fidelity"]


def policies_table(rows: Sequence[Row], budget_bytes: int | None, batch_norm: bool = False) -> Table:
    """Predicted peak and time of every policy, the latter with the host's share and transfers in line; ``batch_norm``
    says that sub-batches would change statistics."""
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
        slower = f"{made.prediction.wall_s / plain.prediction.wall_s - 1:+.1%}"
        fits = "yes" if row.fits else "no"
        shown.add_row(row.policy, peak, milliseconds(made.prediction.wall_s), slower, made.fidelity + parts, fits)
    return shown


def decisions_table(graph: SavedGraph, costs: CostTable, made: Plan, width: int = 1000) -> Table:
    """A plan's decision for every kept storage, largest first, with the reason for it where ``width`` leaves room."""
    title = f"{made.policy}: what becomes of the tensors kept for backward, largest first"
    shown = table(title, "tensor", "shape", "kept as", ">plain MiB", ">kept MiB")
    decided = {d.storage: d for d in made.decisions}
    blocks = sorted((b for b in held(graph) if b.storage >= 0), key=lambda b: -b.nbytes)
    kept = {b.id: kept_bytes(b, decided.get(b.storage), costs) for b in blocks}
    rows = []
    for block in blocks[:SHOWN]:
        decision = decided.get(block.storage)
        why = decision.reason if decision else "nothing decided"
        sizes = (mib(block.nbytes), mib(kept[block.id]))
        rows.append((*_names(graph, block.storage), form_of(decision), *sizes, why))
    rest = blocks[SHOWN:]
    if rest:
        sums = (sum(b.nbytes for b in rest), sum(kept[b.id] for b in rest))
        rows.append((f"{len(rest)} smaller ones", "", "", *map(mib, sums), "in --json"))
    columns = len(shown.columns)
    taken = sum(3 + max((len(row[i]) for row in rows), default=0) for i in range(columns))
    reasons = width - taken >= WHY
    if reasons:
        shown.add_column("why")
    for row in rows:
        shown.add_row(*row[: columns + reasons])
    return shown


def _names(graph: SavedGraph, storage: int) -> tuple[str, str]:
    """Who made a storage last, and its shape."""
    s = graph.storages[storage]
    last = graph.writers(storage)[-1:]
    made = f"{last[0].module} {last[0].op}" if last else s.kind
    return made.strip(), "x".join(map(str, s.shape))


def form_of(decision: Decision | None) -> str:
    """How a storage is kept, in a few words."""
    if decision is None:
        return "dense"
    where = " on the host" if decision.on_host else ""
    mask = " + mask1" if decision.mask else ""
    return f"{decision.codec}{mask}{where}"


def least_table(least: Mapping[str, int], lossy: str, plain_bytes: int) -> Table:
    """The least budget that each class of moves can meet."""
    shown = table("least feasible budget", "class of moves", ">MiB", ">of plain")
    for name, nbytes in least.items():
        moves = f"lossy ({lossy})" if name == "lossy" else name
        shown.add_row(moves, mib(nbytes), f"{nbytes / max(1, plain_bytes):.1%}")
    return shown
