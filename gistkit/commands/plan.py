"""``gistkit plan MODEL``: what a policy does with every tensor under a budget, beside every other policy."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gistkit.api import costs_of, fitted, host_remedy, plan_graph, with_times
from gistkit.api import read_steps as measured_steps
from gistkit.commands.images import WIDE, add_images, image_step, prepare
from gistkit.commands.wrong import input_errors, write
from gistkit.errors import BudgetError, PlanError
from gistkit.ir import Plan, SavedGraph
from gistkit.kernels import ENGINE
from gistkit.planning import accepts, check_words, refused
from gistkit.planning.cost import CostTable, StepTimes, check_budget, parse_budget
from gistkit.planning.forms import held, kept_bytes
from gistkit.planning.policies import POLICIES
from gistkit.planning.simulate import trains_batch_norm
from gistkit.report import console, mib, milliseconds, table, told

SHOWN = 40


@dataclass(frozen=True)
class Row:
    """One policy under the budget: its plan, or the ``error`` of one that has none, in a word the ``note``. ``fits``
    tells whether its peak is within the budget; a policy that aims at no budget is shown either way."""

    policy: str
    plan: Plan | None
    fits: bool
    note: str = ""
    error: BudgetError | PlanError | None = None


@dataclass(frozen=True)
class Findings:
    """Everything that the command shows."""

    graph: SavedGraph
    costs: CostTable
    times: StepTimes | None
    budget_bytes: int | None
    rows: list[Row]

    @property
    def plain(self) -> Plan:
        return next(row.plan for row in self.rows if row.policy == "plain" and row.plan)


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = commands.add_parser("plan", help="plan a training step within a memory budget, and compare all policies")
    add_images(parser)
    parser.add_argument("--budget", metavar="BYTES", help="12GiB, 800MB, or 60%% of what plain PyTorch needs")
    parser.add_argument("--policy", metavar="NAME", default="optimal", help=f"one of {', '.join(POLICIES)}")
    parser.add_argument("--fidelity", metavar="CLASS", default="bitwise", help="bitwise or reassociated")
    parser.add_argument("--lossy", metavar="FORMAT", help="allow rounded activations: fp16, fp8, fp8s, int4s, ...")
    text = "measured steps, JSON of {plan, step_s, densities} a line: the host's seconds a task are fitted to them"
    parser.add_argument("--from-stats", metavar="FILE", type=Path, help=text)
    text = "accept sub-batches whose batch norms see the statistics of each part"
    parser.add_argument("--per-sub-batch-norm", action="store_true", help=text)


def run(options: argparse.Namespace) -> int:
    """Plan, write, show; 1 where the policy has no plan within the budget."""
    device = prepare(options)
    with input_errors():
        check_words(options.policy, options.fidelity, options.lossy)
        check_budget(options.budget)
        steps = measured_steps(options.from_stats) if options.from_stats else []
    with Console(stderr=True).status("measuring a step" if options.measure else "recording a step"):
        graph, times = image_step(options, device, options.per_sub_batch_norm, cut=True)
    with input_errors(ValueError):
        densities = {storage: share for step in steps for storage, share in step.densities.items()}
        costs = costs_of(graph, device, times, densities or None)
        costs = fitted(graph, costs, steps) if steps else costs
    found = _find(graph, costs, times, options)
    chosen = next(row for row in found.rows if row.policy == options.policy)
    if options.json:  # files first: whoever reads the tables may close them early
        write(options.json, _as_json(found, chosen, options) + "\n")
    _show(found, chosen)
    if chosen.fits:
        return 0
    print(f"gistkit: no plan by policy {chosen.policy!r}: {_why(found, chosen, options)}", file=sys.stderr)
    return 1


def _find(graph: SavedGraph, costs: CostTable, times: StepTimes | None, options: argparse.Namespace) -> Findings:
    plain = POLICIES["plain"](graph, costs)
    with input_errors(ValueError):
        budget_bytes = parse_budget(options.budget, plain.peak_bytes)
    words = {name: getattr(options, name) for name in ("fidelity", "lossy", "per_sub_batch_norm")}
    with Console(stderr=True).status("planning"):
        rows = [_row(name, graph, costs, budget_bytes, words) for name in POLICIES]
    return Findings(graph, costs, times, budget_bytes, rows)


def _row(name: str, graph: SavedGraph, costs: CostTable, budget_bytes: int | None, words: Mapping) -> Row:
    """A policy under the budget; of ``words``, settings of :func:`gistkit.api.plan_graph`, it takes what it knows."""
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


def engines_told(graph: SavedGraph, made: Plan) -> str:
    """Which convolutions run by engines of cuDNN, '' for none."""
    modules = {call.covered: call.module or call.op for call in graph.calls}
    named = [f"{modules[c.covered]} {c.algorithm}" for c in made.choices if ENGINE in c.algorithm]
    return f"by engines of cuDNN: {'; '.join(named)}" if named else ""


def _show(found: Findings, chosen: Row) -> None:
    shown = console()
    if chosen.plan is not None:
        shown.print(decisions_table(found.graph, found.costs, chosen.plan, shown.width >= WIDE))
    shown.print(policies_table(found.rows, found.budget_bytes, trains_batch_norm(found.graph)))
    if chosen.plan is not None:
        shown.print(_summary(chosen.plan, found.plain))
        if engines := engines_told(found.graph, chosen.plan):
            shown.print(engines)
        left_out = chosen.plan.prediction.not_compared
        if left_out:
            shown.print(f"not compared, for want of time: {', '.join(left_out)} may be faster")
        waits = host_remedy(found.graph, found.costs, chosen.plan)
        if waits:
            shown.print(waits)
    if found.times is not None:
        shown.print(f"seconds {told(found.times)}")


def _summary(made: Plan, plain: Plan) -> str:
    gap = "" if made.gap is None else f", at most {made.gap:.2%} above the least possible time"
    parts = "" if made.sub_batches == 1 else f", in {made.sub_batches} sub-batches"
    return (
        f"{made.policy} on {made.hardware}: peak {mib(made.peak_bytes)} MiB (plain {mib(plain.peak_bytes)}), step "
        f"{milliseconds(made.step_s)} ms (plain {milliseconds(plain.step_s)}), moves {made.fidelity}{parts}{gap}"
        f"\nrates of {made.hardware}: {made.prediction.rates}"
    )


def _why(found: Findings, chosen: Row, options: argparse.Namespace) -> str:
    """Which classes of moves would do: the error that ``gistkit.plan`` raises."""
    if found.budget_bytes is None or isinstance(chosen.error, PlanError):
        return str(chosen.error)  # no link, or the device's memory is too small
    why = chosen.error or chosen.plan
    assert why is not None
    settings = {"fidelity": "lossy" if options.lossy else options.fidelity, "lossy": options.lossy}
    settings |= {"reserve": 0, "batch_norm": options.per_sub_batch_norm}
    return str(refused(found.graph, found.costs, found.budget_bytes, settings, chosen.policy, why))


def _as_json(found: Findings, chosen: Row, options: argparse.Namespace) -> str:
    rows = [{"policy": r.policy, "fits": r.fits, "note": r.note, **_figures(r.plan)} for r in found.rows]
    return json.dumps(
        {
            "model": options.model,
            "batch": options.batch,
            "image_size": options.image_size,
            "hardware": asdict(found.costs.hardware),
            "budget_bytes": found.budget_bytes,
            "times": None if found.times is None else asdict(found.times),
            "policies": rows,
            "plan": None if chosen.plan is None else json.loads(with_times(chosen.plan, found.times).to_json()),
        }
    )


def _figures(made: Plan | None) -> dict:
    if made is None:
        return {}
    names = ("peak_bytes", "step_s", "kept_bytes", "fidelity", "sub_batches", "gap", "lower_bound_bytes")
    return {name: getattr(made, name) for name in names}
