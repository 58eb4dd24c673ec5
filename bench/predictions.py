"""Predicted and measured seconds of a step under every policy, on the device at hand.

    python -m bench.predictions --out bench/results/NAME.jsonl [--max-s 200]
    python -m bench.predictions --out ... --models vgg16 --rows 256 --budgets 12GiB --channels-last --rivals
    python -m bench.table docs/budgets.md bench/results/NAME.jsonl

Four networks are planned under every policy, within a share of plain PyTorch's peak, or without a budget where the
policy has no plan within it, and ``gistkit.step`` runs the plan: forward, loss and backward. ``graph:optimal``,
say, is planned for a CUDA graph and run as one; what its pool holds is ``graph_bytes``. A row's ``ratio`` is
``plan.step_s`` over the median of the measured steps behind the warm-up that had a quiet core (:mod:`bench.pace`),
``measured_peak_bytes`` the most that the CUDA allocator handed out in them. ``--rivals`` adds PyTorch's own ways to
save memory: its checkpoints and ``save_on_cpu``. The tasks' seconds are those of a measured plain step, as
``gistkit.plan`` takes them on a card, or with ``--by-rates`` those of a calibration, which is made first (``rates``
names it; ``--rates NAME``: a preset or a file instead).

A row that ``--out`` holds is not run again. Processes that have the same ``--lock FILE`` plan side by side, and what
runs on the device is alone there: calibration, the measured plain step, the steps that are timed. ``--device cpu``
tries it out. A budget is a share of a plain step that lets go of the model's output when the loss is there, as
``gistkit.step`` does (rows until e43d9496 counted it to the end). Exit status 1 where a step
failed, 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from bench.alone import alone
from bench.networks import GPT, Transformer, densenet121
from bench.pace import Timings
from bench.rows import environment, read, utc
from bench.variants import VARIANTS
from gistkit import zoo
from gistkit.planning.cost.devices import Hardware, hardware
from gistkit.planning.policies.registry import POLICIES
from gistkit.profiling import calibrate
from gistkit.profiling.host import loop_s
from gistkit.runtime.step.graphed import WARM_UP as BEFORE_CAPTURE

WARM_UP, TIMED = 3, 11
CLASSES, TOKENS = 1000, 8192
WITHIN = 0.15
RIVALS = ("checkpoint", "save_on_cpu")
"""Of :data:`bench.variants.VARIANTS`; as policies ``torch:checkpoint`` and ``torch:save_on_cpu``."""
Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Case(NamedTuple):
    """A network, its batch by number of rows, the share of plain's peak that it is planned for, and its loss."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    rows: int
    budget: str
    loss: Loss = F.cross_entropy


def images(rows: int, side: int = 224, classes: int = CLASSES) -> Batch:
    """Noise and labels."""
    return torch.randn(rows, 3, side, side), torch.randint(classes, (rows,))


def tokens(rows: int, length: int = 256) -> Batch:
    """Tokens, and one to tell at every position."""
    return torch.randint(TOKENS, (rows, length)), torch.randint(TOKENS, (rows, length))


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens, as language models write it. With the classes in the middle, where ``F.cross_entropy``
    has them of more than two dimensions, a step took 115 ms on an H100 and 232 in two halves."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def of_zoo(name: str, classes: int = CLASSES, side: int = 224) -> Callable[[], nn.Module]:
    """A network of the zoo."""
    return lambda: zoo.load(name, num_classes=classes, image_size=side)


CASES = {
    "resnet50": Case(of_zoo("resnet50"), images, 128, "40%"),
    "vgg16": Case(of_zoo("vgg16"), images, 128, "60%"),
    "densenet121": Case(densenet121, images, 64, "50%"),
    "transformer": Case(Transformer, tokens, 32, "60%"),
    "gpt2": Case(GPT, lambda rows: tokens(rows, 1024), 8, "50%", token_loss),
    "vgg19": Case(of_zoo("vgg19"), images, 256, "12GiB"),
    "vgg416": Case(of_zoo("vgg416"), images, 32, "12GiB"),
    "resnet1202": Case(of_zoo("resnet1202", 10, 32), lambda rows: images(rows, 32, 10), 138, "12GiB"),
}
USUAL = tuple(CASES)[:4]
"""What is run unless ``--models`` names others, which the papers' tables ask for."""


class Words(NamedTuple):
    """What the command line changes of the cases: rows (0: the case's), budgets (none: the case's), precision, memory
    format."""

    rows: int = 0
    budgets: tuple[str, ...] = ()
    dtype: str = "fp32"
    channels_last: bool = False

    def formatted(self, made: Any) -> Any:
        """A model or images in the memory format."""
        has_images = isinstance(made, nn.Module) or made.dim() == 4
        to: Any = made.to  # modules take the keyword too, which their overloads do not say
        return to(memory_format=torch.channels_last) if self.channels_last and has_images else made

    def precision(self, device: str) -> AbstractContextManager:
        """fp32 and tf32: the convolutions' and products' rule for the whole process; bf16: autocast."""
        if device == "cuda":
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = self.dtype == "tf32"
        return torch.autocast(device, torch.bfloat16) if self.dtype == "bf16" else nullcontext()


AS_THEY_ARE = Words()


def planned(
    model: nn.Module, batch: Batch, loss_fn: Loss, policy: str, budget: str | None, **options: Any
) -> gistkit.Plan:
    """The policy's plan within the budget, without one where it has none within it; `plain` has none ever."""
    words = {"loss_fn": loss_fn, "policy": policy, "fidelity": "reassociated", "hold_output": False, **options}
    try:
        return gistkit.plan(model, *batch, budget=None if policy == "plain" else budget, **words)
    except gistkit.BudgetError:
        return gistkit.plan(model, *batch, **words)


def step_seconds(step: Callable[[], Any], model: nn.Module, device: str, captured: bool = False) -> dict[str, Any]:
    """Seconds of the timed steps, the device drained before and after, and those after which the host had issued all
    (``host_s``): the medians of the steps on a quiet core (:mod:`bench.pace`). The most bytes that were allocated, of a
    step that is ``captured`` into a CUDA graph in the warm-up those that were allocated then."""
    drain = torch.cuda.synchronize if device == "cuda" else lambda: None
    taken, host = Timings(), Timings()
    warm_up = BEFORE_CAPTURE + 1 if captured else WARM_UP
    for number in range(warm_up + TIMED):
        model.zero_grad(set_to_none=True)
        drain()
        if device == "cuda" and number == warm_up - captured:
            torch.cuda.reset_peak_memory_stats()
        loop_before, start = loop_s(), time.perf_counter()
        step()
        issued = time.perf_counter() - start
        drain()
        if number >= warm_up:
            taken.add(time.perf_counter() - start, loop_before)
            host.add(issued, loop_before)
    seconds = taken.quiet
    return {
        **host.figures,
        "host_s": host.median,
        "measured_s": taken.median,
        "fastest_s": seconds[0],
        "slowest_s": seconds[-1],
        "measured_peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }


def rival_row(model: nn.Module, batch: Batch, loss_fn: Loss, name: str, device: str) -> dict[str, Any]:
    """What steps take in one of PyTorch's own ways; ReLUs are not in place, as checkpoints do not bear the write."""
    variant, in_place = VARIANTS[name], [m for m in model.modules() if isinstance(m, nn.ReLU) and m.inplace]
    run = variant.prepare(model)
    for module in in_place:
        module.inplace = False

    def step() -> None:
        with variant.around(device == "cuda"):
            loss = loss_fn(run(batch[0]), batch[1])
        loss.backward()

    try:
        return step_seconds(step, model, device)
    finally:
        for module in model.modules():  # the checkpoints' forwards go
            vars(module).pop("forward", None)
        for module in in_place:
            module.inplace = True


def measured_row(
    model: nn.Module, batch: Batch, loss_fn: Loss, plan: gistkit.Plan, device: str, captured: bool
) -> dict[str, Any]:
    """What one plan predicts, and what its steps take."""
    plain = plan.policy == "plain"
    if not plain:
        gistkit.compress(model, plan)
    graph = gistkit.GraphedStep(model, loss_fn) if captured else None
    step = graph or partial(gistkit.step, model, loss_fn)
    try:
        taken = step_seconds(lambda: step(*batch), model, device, captured)
    finally:
        if not plain:
            gistkit.restore(model)
    predicted = plan.prediction
    return {
        **taken,
        **({} if graph is None else {"graph_bytes": graph.graph_bytes}),
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "hardware": plan.hardware,
        "rates": predicted.rates,
        "measured_times": predicted.measured is not None,
        "sub_batches": plan.sub_batches,
        "taken_from": plan.details.get("taken_from", ""),
        "predicted_s": plan.step_s,
        "ratio": plan.step_s / taken["measured_s"],
    }


class Run(NamedTuple):
    """What all rows of a process have in common. ``over``: whether time is up; ``held``: keys of rows that exist."""

    device: str
    rates: Hardware
    measure: bool
    over: Callable[[], bool]
    lock: Path | None = None
    held: Container[tuple[Any, ...]] = ()


KEY = ("model", "batch", "dtype", "channels_last", "policy", "budget")


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What no two rows of a file have in common."""
    return tuple([row[name] for name in KEY])


def rows(name: str, policies: list[str], run: Run, words: Words = AS_THEY_ARE) -> Iterator[dict[str, Any]]:
    """A row a policy and budget of one network; with ``error`` where it could not be planned or run."""
    case, device = CASES[name], run.device
    count = words.rows or case.rows
    fixed = {"model": name, "batch": count, "dtype": words.dtype, "channels_last": words.channels_last}
    budgets = words.budgets or (case.budget,)
    unbound = [(policy, "") for policy in policies if policy.endswith("plain") or policy.startswith("torch:")]
    todo = unbound + [(p, b) for b in budgets for p in policies if (p, "") not in unbound]
    todo = [(p, b) for p, b in todo if key_of({**fixed, "policy": p, "budget": b}) not in run.held]
    if not todo:
        return
    torch.manual_seed(0)
    with alone(run.lock), words.precision(device):
        inputs, targets = case.batch(count)
        batch = words.formatted(inputs.to(device)), targets.to(device)
        model: nn.Module = words.formatted(case.model().to(device).train())
        start = time.perf_counter()
        times: Any = gistkit.measure(model, *batch, loss_fn=case.loss) if run.measure else False
        print(f"{name}: measured in {time.perf_counter() - start:.1f} s", flush=True)
        emptied(device)
    if times and times.workspace_remedy:
        print(f"{name}: {times.workspace_remedy}", flush=True)
    for policy, budget in todo:
        row = {"kind": "prediction", "time_utc": utc(), **environment(device), **fixed}
        row |= {"policy": policy, "budget": budget}
        plan = None
        with words.precision(device):
            kind, _, base = policy.rpartition(":")
            if kind != "torch":
                start = time.perf_counter()
                options = {"hardware": run.rates, "measure": times, "cuda_graph": kind == "graph"}
                with noted(row):
                    plan = planned(model, batch, case.loss, base, budget or None, **options)
                row["planning_s"] = time.perf_counter() - start
            with alone(run.lock):
                if run.over():
                    print(f"bench.predictions: time is up before {name}, {policy} {budget}", file=sys.stderr)
                    return
                with noted(row):
                    if plan is not None:
                        row |= measured_row(model, batch, case.loss, plan, device, kind == "graph")
                    elif "error" not in row:
                        row |= rival_row(model, batch, case.loss, base, device)
                plan = None
                emptied(device)
        yield row


@contextmanager
def noted(row: dict[str, Any]) -> Iterator[None]:
    """An error in here becomes the row's."""
    try:
        yield
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"


def emptied(device: str) -> None:
    """Nothing is left on the device that nobody holds."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def shown(row: dict[str, Any]) -> str:
    """The row in a line."""
    name = f"{row['model']} {row['policy']}"
    if "error" in row:
        return f"{name}: {row['error'][:200]}"
    if "ratio" not in row:
        return f"{name}: measured {1e3 * row['measured_s']:.1f} ms"
    taken = f" (as {row['taken_from']})" if row["taken_from"] else ""
    limit = "no budget" if row["budget_bytes"] is None else row["budget"]
    verdict = "" if abs(row["ratio"] - 1) <= WITHIN else "  <-- not within 15 %"
    return (
        f"{name}{taken}, {limit}: predicted {1e3 * row['predicted_s']:.1f} ms, "
        f"measured {1e3 * row['measured_s']:.1f}: {row['ratio']:.2f}{verdict}"
    )


def ranking(found: list[dict[str, Any]]) -> list[str]:
    """By network and budget, whether `optimal` was measured as the fastest of the policies within the budget."""
    lines = []
    for best in found:
        if not best["policy"].endswith("optimal") or "error" in best or best["budget_bytes"] is None:
            continue
        own = (r for r in found if r["model"] == best["model"] and "error" not in r)
        own = (r for r in own if "peak_bytes" in r)
        fastest = min((r for r in own if r["peak_bytes"] <= best["budget_bytes"]), key=lambda r: r["measured_s"])
        taken = f"{best['policy']} {1e3 * best['measured_s']:.1f} ms, fastest {fastest['policy']}"
        lines.append(f"{best['model']} in {best['budget']}: {taken}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.predictions", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file; rows that it holds are not run again")
    parser.add_argument("--models", default=",".join(USUAL), help=f"of {', '.join(CASES)}")
    parser.add_argument("--policies", default=",".join(POLICIES), help="graph:NAME: planned and run as a CUDA graph")
    parser.add_argument("--rows", type=int, default=0, help="of the batch, in place of each case's own")
    parser.add_argument("--budgets", default="", help="in place of each case's own: 12GiB, 60%%,40%%,25%% or none")
    parser.add_argument("--dtype", choices=("fp32", "tf32", "bf16"), default="fp32")
    parser.add_argument("--rivals", action="store_true", help="PyTorch's checkpoints and save_on_cpu, too")
    parser.add_argument("--rates", help="a preset or a file in place of a calibration")
    parser.add_argument("--channels-last", action="store_true", help="model and images in that memory format")
    parser.add_argument("--by-rates", action="store_true", help="plan without measured seconds")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--lock", type=Path, help="file; who has the same one is alone on the device in turn")
    parser.add_argument("--max-s", type=float, default=200.0, help="start no case after this many seconds")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("bench.predictions: needs a CUDA device; `gistkit plan` predicts without one", file=sys.stderr)
        return 2
    deadline, found = time.monotonic() + args.max_s, []
    with alone(args.lock):
        rates = hardware(args.rates) if args.rates else calibrate(args.device)
    policies = args.policies.split(",") + [f"torch:{name}" for name in RIVALS if args.rivals]
    budgets = tuple("" if budget == "none" else budget for budget in args.budgets.split(",") if budget)
    words = Words(args.rows, budgets, args.dtype, args.channels_last)
    held = {key_of(row) for row in read(args.out, "prediction")} if args.out.exists() else set()
    over = lambda: time.monotonic() > deadline  # noqa: E731
    run = Run(args.device, rates, not args.by_rates, over, args.lock, held)
    with open(args.out, "a", encoding="utf-8") as file:
        for name in args.models.split(","):
            for row in rows(name, policies, run, words):
                print(shown(row), flush=True)
                file.write(json.dumps(row) + "\n")
                file.flush()
                found.append(row)
    ratios = [r["ratio"] for r in found if "ratio" in r]
    if ratios:
        near = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
        print(f"{near} of {len(ratios)} within 15 %, from {min(ratios):.2f} to {max(ratios):.2f}")
    print("\n".join(ranking(found)))
    return int(any("error" in r for r in found))


if __name__ == "__main__":
    sys.exit(main())
