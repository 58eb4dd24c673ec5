"""What the papers claim, measured: their policies as steps of PyTorch on the card that ``bench.predictions`` ran on.

A claim compares steps of one run with each other: a loss over plain PyTorch, one policy over another, a peak. Its value
here is that of the newest run which has all the steps that it compares.
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
    """A network by its name in the zoo, images a batch, a policy, and the budget as ``bench.predictions`` took it."""

    network: str
    batch: int
    policy: str
    budget: str = ""


Steps = Mapping[Step, Mapping[str, Any]]
Formula = Callable[[list[Mapping[str, Any]]], float]


@dataclass(frozen=True)
class Claim:
    """Steps by network, and what is computed from their rows. ``networks`` of which no run has the steps are left out
    of the mean, or of the most where ``most``."""

    networks: tuple[tuple[Step, ...], ...]
    formula: Formula
    most: bool = False


@dataclass(frozen=True)
class Measured:
    """A claim's value, and where it is from: the card, the date, the networks, precision and memory format."""

    value: float
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
    ("cdma", "six networks", 0, "cDMA over vDNN, average"): Claim(_cdma(LIMIT), faster),
    ("cdma", "six networks", 0, "cDMA over vDNN, most"): Claim(_cdma(LIMIT), faster, most=True),
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
            found.append({Step(r["model"], r["batch"], r["policy"], _budget(r)): r for r in own})
    return found


def _setting(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row.get("dtype"), row.get("channels_last")


def measured(row: Row, of_runs: Iterable[Steps]) -> Measured | None:
    """What the card says of a row's claim; None where no claim is known, or no run has its steps."""
    claim = CLAIMS.get((row.paper, row.network, row.batch, row.metric))
    if claim is None:
        return None
    for run in of_runs:
        sets = [steps for steps in claim.networks if all(s in run for s in steps)]
        if sets:
            values = [claim.formula([run[s] for s in steps]) for steps in sets]
            value = max(values) if claim.most else mean(values)
            return Measured(value, _origin(run[sets[0][0]], [f"{s[0].network} ({s[-1].batch})" for s in sets]))
    return None


def _budget(row: Mapping[str, Any]) -> str:
    """The budget that the plan was made for; none where the policy had no plan within the one that was asked for."""
    return row["budget"] if row.get("budget_bytes") is not None else ""


def _origin(row: Mapping[str, Any], networks: list[str]) -> str:
    format_ = ", channels_last" if row.get("channels_last") else ""
    where = f"{row['gpu']}, {row['time_utc'][:10]}, commit {row['commit']}"
    return f"Measured: {', '.join(networks)}, {row.get('dtype', 'fp32')}{format_}, on an {where}"
