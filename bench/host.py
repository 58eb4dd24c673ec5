"""The host's time to issue a step under plans, beside plain PyTorch's and its checkpoints', on the device at hand.

    python -m bench.host --model gpt2 --rows 8 --dtype bf16 --budget 50% --rates FILE [--profile]

``host`` is from a step's start until all of it is issued, ``step`` until the device is done too; the median of some
steps. ``calls`` counts Python's calls in one step, those of C functions among them, in the thread that runs the step:
on CUDA backward runs in another one, whose calls are not counted. ``--profile`` lists where forward and, on a CPU,
backward spend most.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gistkit
from bench.predictions import CASES, Words
from bench.variants import VARIANTS

WARM_UP, TIMED = 4, 10


def timed(step: Callable[[], Any], model: nn.Module, drain: Callable[[], None]) -> tuple[float, float]:
    """Median milliseconds until a step is issued, and until it is done."""
    issued, done = [], []
    for _ in range(WARM_UP + TIMED):
        model.zero_grad(set_to_none=True)
        drain()
        start = time.perf_counter()
        step()
        issued.append(time.perf_counter() - start)
        drain()
        done.append(time.perf_counter() - start)
    host_s, step_s = (statistics.median(found[WARM_UP:]) for found in (issued, done))
    return 1e3 * host_s, 1e3 * step_s


def prepared(policy: str, model: nn.Module, batch: Any, args: argparse.Namespace) -> tuple[Callable[[], Any], str]:
    """A step under a policy, and what its plan says."""
    loss_fn = CASES[args.model].loss
    if policy in ("plain", "checkpoint of PyTorch"):
        run = model if policy == "plain" else VARIANTS["checkpoint"].prepare(model)

        def step() -> None:
            loss = loss_fn(run(batch[0]), batch[1])
            loss.backward()

        return step, ""
    words: dict[str, Any] = {"loss_fn": loss_fn, "fidelity": "reassociated", "hardware": args.rates, "policy": policy}
    words["measure"] = args.device == "cuda"
    budget = args.budget if policy == "optimal" else None
    plan = gistkit.plan(model, *batch, budget=budget, **words)
    gistkit.compress(model, plan)
    forms = {d.codec: sum(e.codec == d.codec for e in plan.decisions) for d in plan.decisions}
    said = f", predicted {1e3 * plan.step_s:.1f} ms, {plan.sub_batches} sub-batches, {forms}"
    return lambda: gistkit.step(model, loss_fn, *batch), said


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.host", description=__doc__)
    parser.add_argument("--model", choices=tuple(CASES), default="gpt2")
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--dtype", choices=("fp32", "tf32", "bf16"), default="bf16")
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--policies", default="optimal,checkpoint")
    parser.add_argument("--rates", help="a preset or a file in place of the device's own")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args(argv)
    drain = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    case = CASES[args.model]
    for policy in ("plain", "checkpoint of PyTorch", *args.policies.split(",")):
        torch.manual_seed(0)
        model = case.model().to(args.device).train()
        batch = tuple(t.to(args.device) for t in case.batch(args.rows or case.rows))
        with Words(dtype=args.dtype).precision(args.device):
            step, said = prepared(policy, model, batch, args)
            host_ms, step_ms = timed(step, model, drain)
            profile = cProfile.Profile()
            model.zero_grad(set_to_none=True)
            profile.runcall(step)
            drain()
        found = pstats.Stats(profile)
        calls = found.total_calls  # type: ignore[attr-defined]
        print(f"{policy}: host {host_ms:.1f} ms, step {step_ms:.1f} ms, {calls} calls{said}", flush=True)
        if args.profile:
            found.sort_stats("tottime").print_stats(25)
        del step, model, batch
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
