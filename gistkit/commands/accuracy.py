"""``gistkit accuracy MODEL``: test accuracy under several schemes of rounding and seeds, against fp32's spread."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console
from rich.table import Table

from gistkit.commands.wrong import HERE, claim, input_errors, progress_bars, writing
from gistkit.errors import printable
from gistkit.report import console, mib, table
from gistkit.training import Accuracy, AccuracySettings, SchemeResult, plot_accuracy

VERDICT = (
    ", mean and standard deviation over {seeds} seeds; interval: 90 % for the difference of the means, Welch's t-test; "
    "not worse: a loss of 0.5 points or more is rejected (one-sided, 5 %); worse: that it is as good is "
    "rejected; open: neither, take more seeds"
)
MARGIN = 0.005
"""Accuracy that a scheme must be shown not to lose."""
BITS = (
    "; minus fp32: in points; MiB: all that is kept for backward; bits: the same, by element that plain PyTorch keeps; "
    "'-': the scheme keeps its rounded values in fp32"
)


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    default = {field.name: field.default for field in fields(AccuracySettings)}
    parser = commands.add_parser("accuracy", help="train under several schemes of rounding, and compare the accuracy")
    parser.add_argument("model", metavar="MODEL", help="of gistkit.zoo (resnet20, ...) or package.module:factory")
    text = "train/CLASS and test/CLASS with images, or 'digits'"
    parser.add_argument("--data", metavar="DIR", default=default["data"], help=text)
    text = "fp32, and with commas between: fp8 (delayed), zvc+fp8, immediate:fp8, gradients:fp8, ..."
    parser.add_argument("--schemes", metavar="A,B,...", default=",".join(AccuracySettings.schemes), help=text)
    for name, text in (
        ("seeds", "trainings of every scheme; one gives no verdict"),
        ("epochs", "of each training"),
        ("batch", "images a step"),
        ("image-size", "height and width the images are brought to"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="N", default=default[name.replace("-", "_")], help=text)
    text = "highest learning rate: it rises over the first tenth of the steps, then falls along a cosine"
    parser.add_argument("--lr", type=float, metavar="RATE", default=default["lr"], help=text)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=HERE, help="where to train")
    text = "let convolutions on CUDA compute in TF32, as PyTorch's do by default: faster, and rounds to 10 bits itself"
    parser.add_argument("--tf32", action="store_true", help=text)
    text = "keep images and parameters in channels_last, in which TF32 is up to twice as fast"
    parser.add_argument("--channels-last", action="store_true", help=text)
    text = "folder of the rows; a run that was cut off goes on there, more schemes and seeds may be added"
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("accuracy"), help=text)
    text = "draw accuracy over epochs, making folders"
    parser.add_argument("--plot", metavar="F.png", type=Path, help=text)
    text = "measure densities of fp32's first seed every so many steps; 0: not at all"
    parser.add_argument("--density", type=int, metavar="STEPS", default=default["density"], help=text)


def run(options: argparse.Namespace) -> int:
    """Train what is missing, draw, show."""
    experiment = _prepare(options)
    found = _with_progress(experiment)
    if options.plot:
        with writing(options.plot) as file:
            plot_accuracy(found, f"{options.model} on {options.data}", file)
    console().print(accuracy_table(found, options, experiment.tested))
    return 0


def _prepare(options: argparse.Namespace) -> Accuracy:
    given = {**vars(options), "schemes": tuple(name.strip() for name in options.schemes.split(","))}
    values = {field.name: given[field.name] for field in fields(AccuracySettings) if field.name in given}
    with input_errors():
        settings = AccuracySettings(**values)
        claim(options.out / "rows.jsonl", plot=options.plot)
        with Console(stderr=True).status("looking at the images"):
            return Accuracy(settings, options.out)


def _with_progress(experiment: Accuracy) -> list[SchemeResult]:
    settings = experiment.settings
    with progress_bars() as progress:
        total = settings.seeds * experiment.steps
        tasks = {name: progress.add_task(f"{name:>15}", total=total) for name in settings.schemes}
        return experiment.run(lambda name, done: progress.update(tasks[name], completed=done))


def accuracy_table(found: list[SchemeResult], options: argparse.Namespace, tested: int) -> Table:
    """A row a scheme."""
    size = f"{options.image_size}x{options.image_size}"
    what = f"{options.model} on {options.data}, batch {options.batch}, {size}, {options.epochs} epochs"
    verdict = VERDICT.format(seeds=options.seeds) if options.seeds > 1 else ", of one seed"
    caption = f"accuracy: of {tested} test images after the last epoch{verdict}{BITS}"
    columns = ("scheme", ">accuracy, %", ">minus fp32", ">bits", ">MiB", "verdict")
    shown = table(printable(what), *columns, caption=caption)
    for result in found:
        shown.add_row(*_row(result))
    return shown


def _row(result: SchemeResult) -> tuple[str, ...]:
    points = [100 * a for a in result.accuracies]
    accuracy = f"{fmean(points):.2f}" + (f" ± {stdev(points):.2f}" if len(points) > 1 else "")
    bits = "-" if result.bits is None else f"{result.bits:.1f}"
    kept = "-" if result.kept_bytes is None else mib(result.kept_bytes)
    d = result.difference
    against = "-" if d is None else f"{100 * d.mean:+.2f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]"
    return result.scheme, accuracy, against, bits, kept, "-" if d is None else d.verdict(MARGIN)
