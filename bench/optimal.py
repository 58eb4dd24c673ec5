"""`optimal` against every other policy: ``python -m bench.optimal --networks vgg16:64 --hardware h200 --out FILE``.

For each network, hardware and budget (spread evenly from the least peak found to what plain PyTorch needs): the
predicted step and peak of every policy, those of `optimal`, its gap and its planning time (all but the capture). Exits
with 1 if `optimal` is slower than a policy that fits and is of the class, finds no plan where one does, or exceeds the
budget. A policy's choice of algorithms counts only where the hardware can be told of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.papers.common import commit, say
from bench.papers.networks import Captures
from gistkit.api.planning import plan_graph
from gistkit.errors import BudgetError, PlanError
from gistkit.ir.plan import Plan
from gistkit.ir.saved_graph import SavedGraph
from gistkit.planning.choose import made
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import CostTable, cost_table
from gistkit.planning.policies.optimal.optimal import minimise_peak
from gistkit.planning.policies.optimal.variants import Allowed
from gistkit.planning.policies.registry import POLICIES
from gistkit.planning.simulate.simulator import Simulator

SLACK = 1e-9
"""Rounding of sums of seconds."""


def rows(
    name: str,
    graph: SavedGraph,
    costs: CostTable,
    budgets: int,
    fidelity: str = "bitwise",
    lossy: str | None = None,
    only: Sequence[int] = (),
) -> Iterator[dict]:
    """One row a budget; ``budgets`` of them, or one where there is no room between least and plain peak. ``lossy``: the
    format of that class. ``only``: those of these numbers, from 0 for the least; all without."""
    plain = POLICIES["plain"](graph, costs).peak_bytes
    least = minimise_peak(graph, costs, fidelity, lossy=lossy).peak_bytes
    wanted = [least + (plain - least) * i // max(budgets - 1, 1) for i in range(budgets)]
    for budget in dict.fromkeys(b for i, b in enumerate(wanted) if not only or i in only):
        begun = time.perf_counter()
        try:
            plan = plan_graph(graph, costs, budget=budget, fidelity=fidelity, lossy=lossy)
        except BudgetError:
            plan = None
        seconds = time.perf_counter() - begun
        yield {
            "network": name,
            "batch": graph.batch,
            "hardware": costs.hardware.name,
            "fidelity": fidelity,
            "lossy": lossy,
            "budget_bytes": budget,
            "budget_share": round(budget / plain, 4),
            "policies": others(graph, costs, budget, fidelity, lossy),
            "optimal": _figures(graph, costs, plan),
            "planning_s": round(seconds, 2),
        }


def others(
    graph: SavedGraph, costs: CostTable, budget: int, fidelity: str, lossy: str | None = None
) -> dict[str, dict]:
    """Step and peak of every other policy's plan under the budget that is of the class, plain's with gistkit's host; in
    the class ``lossy`` those of Gist with the format, too."""
    allowed, device = Allowed(fidelity, lossy), costs.hardware
    simulator = Simulator(graph, replace(costs, hardware=replace(device, host_s=device.runtime_host_s)))
    asked: dict[str, tuple[str, str | None]] = {name: (name, None) for name in POLICIES if name != "optimal"}
    if lossy is not None:
        asked[f"gist {lossy}"] = ("gist", lossy)
    found = {}
    for name, (policy, narrow) in asked.items():
        words = {"fidelity": fidelity, "lossy": narrow, "reserve": 0, "batch_norm": False}
        try:
            plan = made(policy, graph, costs, budget, words)
            plan = replace(plan, choices=tuple(replace(c, algorithm="") for c in plan.choices))
            run = simulator.run(plan)
        except (BudgetError, PlanError):
            continue
        if allowed.admits(plan, graph):
            found[name] = {"step_s": run.step_s, "peak_bytes": run.peak_bytes, "fits": run.peak_bytes <= budget}
    return found


def _figures(graph: SavedGraph, costs: CostTable, made: Plan | None) -> dict | None:
    if made is None:
        return None
    run = Simulator(graph, costs).run(made)
    decided = [d.codec if d.place == "device" else d.place for d in made.decisions]
    return {
        "step_s": run.step_s,
        "peak_bytes": run.peak_bytes,
        "gap": made.gap,
        "taken_from": made.details.get("taken_from"),
        "host": decided.count("host"),
        "recompute": sum(d.codec == "recompute" for d in made.decisions),
    }


def wrong(row: dict) -> str:
    """What a row shows that must not be, "" where all is well."""
    fitting = {n: p["step_s"] for n, p in row["policies"].items() if p["fits"]}
    fastest = min(fitting, key=lambda n: fitting[n], default="")
    own = row["optimal"]
    if own is None:
        return f"no plan, but {fastest} has one" if fastest else "no plan at the least peak that was named"
    if own["peak_bytes"] > row["budget_bytes"]:
        return f"peak {own['peak_bytes']} above the budget {row['budget_bytes']}"
    if fastest and own["step_s"] > fitting[fastest] * (1 + SLACK):
        return f"{own['step_s'] * 1e3:.3f} ms, but {fastest} {fitting[fastest] * 1e3:.3f} ms"
    return ""


def line(row: dict) -> str:
    """A row for people."""
    own, bad = row["optimal"], wrong(row)
    step = "no plan" if own is None else f"{own['step_s'] * 1e3:9.2f} ms, gap {own['gap']:.3f}"
    best = min((p["step_s"] for p in row["policies"].values() if p["fits"]), default=None)
    rival = "-" if best is None else f"{best * 1e3:.2f} ms"
    head = f"{row['network']} ({row['batch']}) {row['hardware']} {row['budget_share']:.2f}"
    return f"{head}: {step}, best other {rival}, planned in {row['planning_s']:.1f} s{'  WRONG: ' + bad if bad else ''}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write one JSON row a line, 1 if any row is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--networks", nargs="+", required=True, metavar="NAME:BATCH")
    parser.add_argument("--hardware", nargs="+", default=["h200"])
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument("--only", type=int, nargs="+", default=(), metavar="I", help="these budgets alone, 0 the least")
    parser.add_argument("--fidelity", default="bitwise")
    parser.add_argument("--lossy", help="a format (fp8), for the class lossy")
    parser.add_argument("--out", type=Path, help="rows are appended")
    options = parser.parse_args(arguments)
    fidelity = "lossy" if options.lossy else options.fidelity
    captures, bad = Captures(), 0
    for item in options.networks:
        name, _, batch = item.partition(":")
        graph = captures.zoo(name, int(batch))
        for device in options.hardware:
            costs = cost_table(graph, hardware(device))
            for row in rows(name, graph, costs, options.budgets, fidelity, options.lossy, options.only):
                bad += bool(wrong(row))
                say(line(row))
                if options.out:
                    with options.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({**row, "commit": commit()}) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
