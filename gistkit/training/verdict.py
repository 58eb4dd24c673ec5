"""Is a scheme's accuracy fp32's? Welch's t-test over seeds, the table's row for it, and the picture.

With d the difference of the mean accuracies, scheme minus fp32, [low, high] is Welch's 90 % confidence interval of d
(unequal variances, Welch-Satterthwaite degrees of freedom), whose two ends are one-sided tests at 5 %:

- low > -margin: "not worse": that the scheme loses ``margin`` or more is rejected;
- else high < 0: "worse": that it is as good as fp32 or better is rejected;
- else "open": the seeds tell neither, more are needed.

A scheme is tested by itself: among twenty schemes one is misjudged by chance. One seed gives no verdict.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from gistkit.report import canvas

NOT_WORSE, WORSE, OPEN = "not worse", "worse", "open"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a94a6", "#a6761d", "#7570b3", "#66a61e")
FP32_COLOUR = "#000000"


@dataclass(frozen=True)
class Difference:
    """Mean accuracy of a scheme minus fp32's, and its 90 % confidence interval."""

    mean: float
    low: float
    high: float

    def verdict(self, margin: float) -> str:
        """NOT_WORSE, WORSE or OPEN; see the module docstring."""
        return NOT_WORSE if self.low > -margin else WORSE if self.high < 0 else OPEN


def difference(accuracies: Sequence[float], exact: Sequence[float]) -> Difference | None:
    """Of a scheme's accuracies by seed from fp32's, by Welch; None with fewer than two seeds on a side. Seeds that all
    agree have an interval of no width."""
    if min(len(accuracies), len(exact)) < 2:
        return None
    mean = fmean(accuracies) - fmean(exact)
    if not stdev(accuracies) and not stdev(exact):
        return Difference(mean, mean, mean)
    from scipy.stats import ttest_ind

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)  # seeds of one side that agree
        low, high = ttest_ind(accuracies, exact, equal_var=False).confidence_interval(0.9)
    return Difference(mean, float(low), float(high))


@dataclass(frozen=True)
class SchemeResult:
    """All seeds of one scheme. ``accuracies``: on the test images after the last epoch, by seed; ``curves``: after
    every epoch, by seed. ``bits`` and ``kept_bytes`` are None for schemes that keep their rounded values in fp32."""

    scheme: str
    accuracies: tuple[float, ...]
    curves: tuple[tuple[float, ...], ...]
    bits: float | None
    kept_bytes: int | None
    difference: Difference | None


def results(rows: Sequence[dict[str, Any]], schemes: Sequence[str], seeds: int) -> list[SchemeResult]:
    """A result a scheme, from the rows of finished runs."""
    ordered = sorted(rows, key=lambda row: row["epoch"])
    curves: dict[tuple[str, int], list[float]] = {(name, seed): [] for name in schemes for seed in range(seeds)}
    for row in ordered:
        curves.get((row["scheme"], row["seed"]), []).append(row["accuracy"])
    last = {row["scheme"]: row for row in ordered}
    ends = {name: tuple(curves[name, seed][-1] for seed in range(seeds)) for name in schemes}
    found = []
    for name in schemes:
        of_seeds = tuple(tuple(curves[name, seed]) for seed in range(seeds))
        against = None if name == "fp32" else difference(ends[name], ends.get("fp32", ()))
        found.append(SchemeResult(name, ends[name], of_seeds, last[name]["bits"], last[name]["kept_bytes"], against))
    return found


def plot_accuracy(found: Sequence[SchemeResult], title: str, path: Path) -> None:
    """Draw the test accuracy over the epochs, a line a scheme (the seeds' mean) with a band from the worst seed to the
    best, and write the picture. Overwrites ``path``. Needs matplotlib (``gistkit[plot]``)."""
    figure, axes = canvas()
    others = 0
    for result in found:
        exact = result.scheme == "fp32"
        colour = FP32_COLOUR if exact else COLOURS[others % len(COLOURS)]
        others += not exact
        by_epoch = [[100 * a for a in values] for values in zip(*result.curves, strict=True)]
        epochs, mean = range(1, 1 + len(by_epoch)), [fmean(values) for values in by_epoch]
        style = ":" if result.bits is None else "-"
        label = f"{result.scheme}: {mean[-1]:.2f} %"
        axes.plot(epochs, mean, color=colour, linestyle=style, linewidth=2.2 if exact else 1.5, label=label)
        low, high = ([pick(values) for values in by_epoch] for pick in (min, max))
        axes.fill_between(epochs, low, high, color=colour, alpha=0.08, linewidth=0)
    axes.set_xlabel("epoch")
    axes.set_ylabel("right of all test images (%)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    band = "; band: from the worst seed to the best" if any(len(result.curves) > 1 for result in found) else ""
    axes.set_title(f"{title}{band}")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path)
