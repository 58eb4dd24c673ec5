"""What the papers claim, measured: their policies as steps of PyTorch on the card that ``bench.predictions`` ran on.

A claim compares steps of one run with each other: a loss over plain PyTorch, one policy over another, a peak. For each
network the newest run counts that has all the steps that are compared. Where the policy had no plan within the budget
that is the finding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.papers.common import GB, RESULTS, Row, mean

NAMES = "*predictions*.jsonl"


class Step(NamedTuple):
    """A network by its name in the zoo, images a batch, a policy, and the budget as ``bench.predictions`` was given
    it."""

    network: str
    batch: int
    policy: str
    budget: str = ""


Steps = Mapping[Step, Mapping[str, Any]]
Formula = Callable[[list[Mapping[str, Any]]], float]


@dataclass(frozen=True)
class Claim:
    """Steps by network, and what is computed from their rows. ``networks`` of which no run has the steps are left out
    of the mean, or of the most where ``most``. ``within``: the plans must be within their budgets."""

    networks: tuple[tuple[Step, ...], ...]
    formula: Formula
    most: bool = False
    within: bool = True


@dataclass(frozen=True)
class Measured:
    """A claim's value, None where no plan was within the budget, and where it is from: the card, the date, the
    networks, precision and memory format."""

    value: float | None
    origin: str


def seconds(row: Mapping[str, Any]) -> float:
    """Of one image."""
    return row["measured_s"] / row["batch"]


def lost(rows: list[Mapping[str, Any]]) -> float:
    """Percent of the throughput of the first step that the second has not."""
    return 100 * (1 - seconds(rows[0]) / seconds(rows[1]))


def faster(rows: list[Mapping[str, Any]]) -> float:
    """Percent by which the second step has more throughput than the first."""
    return 100 * (seconds(rows[0]) / seconds(rows[1]) - 1)


def longer(rows: list[Mapping[str, Any]]) -> float:
    """Percent by which the second step takes longer than the first."""
    return 100 * (seconds(rows[1]) / seconds(rows[0]) - 1)


def _over_plain(policy: str, budget: str, *networks: tuple[str, int]) -> tuple[tuple[Step, ...], ...]:
    return tuple((Step(n, batch, "plain"), Step(n, batch, policy, budget)) for n, batch in networks)


def _cdma(budget: str) -> tuple[tuple[Step, ...], ...]:
    networks = (("vgg16", 256), ("vgg16", 128), ("resnet50", 128))
    return tuple((Step(n, batch, "vdnn-all", budget), Step(n, batch, "cdma", budget)) for n, batch in networks)


LIMIT = "12GiB"
DEEP = (("vgg416", 32),)
CLAIMS = {
    ("vdnn", "VGG-16", 256, "dyn in 12 GB: performance loss"): Claim(
        _over_plain("vdnn-dyn", LIMIT, ("vgg16", 256)), lost
    ),
    ("vdnn", "VGG-116 to -416", 32, "dyn: on the GPU, at most"): Claim(
        tuple((Step(n, batch, "vdnn-dyn", LIMIT),) for n, batch in DEEP),
        lambda rows: rows[0]["measured_peak_bytes"] / GB,
        most=True,
    ),
    ("vdnn", "VGG-116 to -416", 32, "dyn: performance kept, least"): Claim(
        _over_plain("vdnn-dyn", LIMIT, *DEEP), lambda rows: 100 - lost(rows)
    ),
    ("modnn", "five networks", 0, "moDNN in 12 GB: training time added, average"): Claim(
        _over_plain("modnn", LIMIT, ("vgg16", 256), ("vgg19", 256)), longer
    ),
    ("cdma", "six networks", 0, "cDMA over vDNN, average"): Claim(_cdma(LIMIT), faster, within=False),
    ("cdma", "six networks", 0, "cDMA over vDNN, most"): Claim(_cdma(LIMIT), faster, True, within=False),
    ("gist", "ResNet-1202", 0, "Gist: speed-up by a larger minibatch"): Claim(
        ((Step("resnet1202", 138, "plain"), Step("resnet1202", 359, "gist")),), faster
    ),
}
"""By paper, network, batch and metric as the tables' rows have them."""


def runs(folder: Path = RESULTS) -> list[dict[Step, dict[str, Any]]]:
    """The steps of every run, a run the rows of a file in one precision and memory format, the newest first; those that
    failed are left out."""
    found = []
    for path in sorted(folder.glob(NAMES), reverse=True):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        whole = [r for r in rows if "measured_s" in r and r.get("measured_peak_bytes")]
        for setting in dict.fromkeys(map(_setting, whole)):
            own = (r for r in whole if _setting(r) == setting)
            found.append({Step(r["model"], r["batch"], r["policy"], r["budget"]): r for r in own})
    return found


def _setting(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row.get("dtype"), row.get("channels_last")


def measured(row: Row, of_runs: Iterable[Steps]) -> Measured | None:
    """What the card says of a row's claim; None where no claim is known, or no run has its steps."""
    claim = CLAIMS.get((row.paper, row.network, row.batch, row.metric))
    if claim is None:
        return None
    known = list(of_runs)
    found: list[list[list[Mapping[str, Any]]]] = []
    taken: set[tuple[Step, ...]] = set()
    for run in known:
        whole = {steps: [run[s] for s in steps] for steps in claim.networks if all(s in run for s in steps)}
        sets = {s: r for s, r in whole.items() if s not in taken and not (claim.within and any(map(_exceeds, r)))}
        taken |= sets.keys()
        found += [list(sets.values())] if sets else []
    if found:
        values = [claim.formula(rows) for sets in found for rows in sets]
        origin = "Measured: " + "; ".join(map(_origin, found))
        return Measured(max(values) if claim.most else mean(values), origin)
    for run in known:
        over = [run[s] for steps in claim.networks for s in steps if s in run and _exceeds(run[s])]
        if over:
            first = over[0]
            peak = f"{first['measured_peak_bytes'] / 2**30:.1f} GiB without a budget"
            return Measured(None, f"No plan of {first['policy']} within {first['budget']} ({peak}): {_origin([over])}")
    return None


def _exceeds(row: Mapping[str, Any]) -> bool:
    """Whether the policy had no plan within the budget that it was given."""
    return bool(row["budget"]) and row["budget_bytes"] is None


def _origin(sets: list[list[Mapping[str, Any]]]) -> str:
    row, networks = sets[0][0], [f"{rows[0]['model']} ({rows[-1]['batch']})" for rows in sets]
    format_ = ", channels_last" if row.get("channels_last") else ""
    where = f"{row['gpu']}, {row['time_utc'][:10]}, commit {row['commit']}"
    return f"{', '.join(networks)}, {row.get('dtype', 'fp32')}{format_}, on an {where}"
