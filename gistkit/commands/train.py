"""``gistkit train MODEL``: plain, lossless and lossy training compared, or plain training and training under a plan."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gistkit.commands.wrong import claim, input_errors, progress_bars, write, writing
from gistkit.errors import printable
from gistkit.planning.policies import POLICIES
from gistkit.report import console, hundredths, table
from gistkit.training import Comparison, RunResult, TrainResult, TrainSettings, plot_memory


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    default = {field.name: field.default for field in fields(TrainSettings)}
    train = commands.add_parser(
        "train", help="train a network plain, lossless and lossy, and compare memory, time and loss"
    )
    train.add_argument("model", metavar="MODEL", help="of gistkit.zoo (vgg16, resnet50, ...) or package.module:factory")
    train.add_argument("--data", metavar="DIR", default=default["data"], help="one folder a class, or 'digits'")
    for name, text in (
        ("steps", "optimiser steps of each training"),
        ("batch", "images a step"),
        ("image-size", "height and width the images are brought to"),
        ("seed", "of parameters, order and dropout"),
    ):
        train.add_argument(f"--{name}", type=int, metavar="N", default=default[name.replace("-", "_")], help=text)
    text = "highest learning rate: it rises over the first tenth of the steps, then falls along a cosine"
    train.add_argument("--lr", type=float, metavar="RATE", default=default["lr"], help=text)
    text = "of SGD, in Nesterov's form"
    train.add_argument("--momentum", type=float, metavar="M", default=default["momentum"], help=text)
    train.add_argument("--lossy", metavar="FORMAT", default=default["lossy"], help="of the lossy training; or 'none'")
    text = "train under a plan for so many bytes (12GiB, or 60%% of plain's peak) in place of lossless and lossy"
    train.add_argument("--budget", metavar="SIZE", help=text)
    text = f"the plan's: {', '.join(POLICIES)}; without --budget the plan has none (default: optimal)"
    train.add_argument("--policy", choices=POLICIES, metavar="NAME", help=text)
    text = "of the plan: bitwise, or reassociated, which allows sub-batches"
    train.add_argument("--fidelity", metavar="CLASS", default=default["fidelity"], help=text)
    train.add_argument("--device", choices=("cpu", "cuda"), default=default["device"], help="where to train")
    text = "write the result, every loss and the memory curves, making folders"
    train.add_argument("--json", metavar="FILE", type=Path, help=text)
    train.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the memory over one step, making folders")


def run(options: argparse.Namespace) -> int:
    """Train, write, show; 1 where a loss that must be the plain one differs from it."""
    comparison = _prepare(options)
    result = _with_progress(comparison, options.steps)
    if options.json:  # files first: whoever reads the tables may close them early
        write(options.json, result.to_json())
    if options.plot:
        with writing(options.plot) as file:
            plot_memory(result, file)
    console().print(result_table(result))
    return _verdict(result)


def _verdict(result: TrainResult) -> int:
    step, plan = result.first_difference, result.plan
    if plan is not None:
        budget = "" if plan.budget_bytes is None else f" of a budget of {hundredths(plan.budget_bytes)}"
        print(
            f"planned: a peak of {hundredths(plan.peak_bytes)} MiB{budget}, everything counted, forward and backward "
            f"in {plan.step_s * 1e3:.2f} ms; they took {(result.runs[-1].backward_s or 0) * 1e3:.2f}"
        )
    name = result.runs[-1].name if plan is not None else "lossless"
    if len(result.runs) < 2:
        print(f"plain PyTorch does not fit the device, so the {name} loss is compared with none")
    elif plan is not None and plan.fidelity != "bitwise":
        print(f"the {name} plan is {plan.fidelity}: its loss may differ from the plain one in its last bits")
    elif step is not None:
        plain, lossless = (run.losses[step] for run in result.runs[:2])
        print(
            f"gistkit: the {name} loss differs from the plain one: {lossless!r} and {plain!r} in step {step + 1}; "
            "lossless training must be bit-exact, please report this",
            file=sys.stderr,
        )
        return 1
    else:
        print(f"the {name} loss equals the plain one bit for bit in all {result.settings.steps} steps")
    return 0


def _prepare(options: argparse.Namespace) -> Comparison:
    given = vars(options)
    values = {field.name: given[field.name] for field in fields(TrainSettings) if field.name in given}
    if options.lossy == "none":
        values["lossy"] = None
    with input_errors():
        settings = TrainSettings(**values)
        claim(options.json, plot=options.plot)
        with Console(stderr=True).status("looking at the images"):
            return Comparison(settings)


def _with_progress(comparison: Comparison, steps: int) -> TrainResult:
    with progress_bars() as progress:
        tasks = {name: progress.add_task(f"{name:>10}", total=steps, start=False) for name in comparison.names}

        def on_step(name: str, done: int) -> None:
            if done == 0:
                progress.start_task(tasks[name])
            progress.update(tasks[name], completed=done)

        return comparison.run(on_step)


def result_table(result: TrainResult) -> Table:
    """The comparison as a table, a row a run."""
    settings, environment = result.settings, result.environment
    size = settings.image_size
    tested = "" if result.tested is None else printable(f"; accuracy on {result.tested}, none trained on")
    what = f"{settings.model} on {settings.data}, batch {settings.batch}, {size}x{size}, {settings.steps} steps"
    where = f"{environment['device']}, {environment['threads']} threads, torch {environment['torch']}"
    memory = "memory without parameters, gradients, optimiser state and batch"
    peak = ">peak device MiB" if settings.device == "cuda" else ">peak live MiB"
    columns = ("training", ">kept MiB", peak, ">ms/step", ">last loss", ">accuracy")
    shown = table(printable(what), *columns, caption=f"{where}; {memory}{tested}")
    for run in result.runs:
        shown.add_row(*_row(run, result.runs[0]))
    return shown


def _row(run: RunResult, plain: RunResult) -> tuple[str, ...]:
    def mib(name: str) -> str:
        nbytes, plain_bytes = getattr(run, name), getattr(plain, name)
        ratio = "" if run is plain else f" ({plain_bytes / nbytes:.2f}x)"
        return f"{hundredths(nbytes)}{ratio}"

    accuracy = "-" if run.accuracy is None else f"{run.accuracy:.1%}"
    times = f"{run.step_s * 1e3:.0f}"
    return run.name, mib("kept_bytes"), mib("shown_peak_bytes"), times, f"{run.losses[-1]:.6f}", accuracy
