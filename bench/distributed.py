"""Training on several GPUs of one machine: compressed and compiled steps under DDP and FSDP2, beside plain ones.

    python -m bench.distributed --out bench/results/NAME.jsonl [--models resnet50] [--variants ddp,"ddp gistkit"]

A process a GPU, NCCL, bf16 under autocast, channels_last, each GPU with images of its own, plain SGD. ``ddp compile``
is ``torch.compile`` around ``DistributedDataParallel``; under ``within`` the compiled model is inside of it. ``fsdp``:
``fully_shard`` of each block of the network's stages, then of the whole. A row's ``step_ms`` is a run of steps without
a synchronisation among them, by their number; ``kept_mib`` and ``peak_mib`` are the first GPU's, less what the step
began with; ``equal`` says of how many of ``of`` tensors (the losses of three steps, the last gradients) every GPU has
the bits of ``reference``. ``--device cpu`` tries it out with gloo.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gistkit
from bench.rows import environment, utc
from bench.training import network
from gistkit.benchmark.measure import MIB

Wrap = Callable[[nn.Module, tuple], Any]
WARM_UP, TIMED, BITS = 10, 20, 3


def _ddp(prepare: Callable[[nn.Module, tuple], Any] = lambda model, batch: model) -> Wrap:
    return lambda model, batch: DistributedDataParallel(prepare(model, batch))


def _planned(model: nn.Module, batch: tuple) -> nn.Module:
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        plan = gistkit.plan(model, *batch, loss_fn=F.cross_entropy, budget="60%")
    return gistkit.compress(model, plan)


def _sharded(compiled: Callable[[nn.Module], Any]) -> Wrap:
    def wrap(model: nn.Module, batch: tuple) -> Any:
        for stage in model.children():
            if isinstance(stage, nn.Sequential):
                for i, block in enumerate(stage):
                    stage[i] = fully_shard(compiled(block))
        return fully_shard(model)

    return wrap


VARIANTS: dict[str, tuple[str, Wrap]] = {
    "ddp": ("ddp", _ddp()),
    "ddp gistkit": ("ddp", _ddp(lambda model, _: gistkit.compress(model))),
    "ddp gistkit fp8s": ("", _ddp(lambda model, _: gistkit.compress(model, lossy="fp8s"))),
    "ddp gistkit 60%": ("ddp", _ddp(_planned)),
    "fsdp": ("fsdp", _sharded(lambda block: block)),
    "fsdp gistkit": ("fsdp", _sharded(gistkit.compress)),
    "ddp compile": ("ddp compile", lambda model, _: torch.compile(DistributedDataParallel(model))),
    "ddp gistkit compiled": ("ddp compile", lambda model, _: gistkit.compile(DistributedDataParallel(model))),
    "ddp compile within": ("ddp compile within", _ddp(lambda model, _: torch.compile(model))),
    "ddp gistkit compiled within": ("ddp compile within", _ddp(lambda model, _: gistkit.compile(model))),
    "fsdp compile": ("fsdp compile", _sharded(partial(torch.compile, dynamic=False))),
    "fsdp gistkit compiled": ("fsdp compile", _sharded(partial(gistkit.compile, dynamic=False))),
}
"""By name: whose bits it must have, and how the model becomes what is called."""


class Run:
    """One variant on this process's device."""

    def __init__(self, name: str, variant: str, rank: int, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device, rank) if options.device == "cuda" else torch.device("cpu")
        torch.manual_seed(0)
        model: Any = network(name).to(self.device).train()
        if not variant.startswith("fsdp"):  # which takes contiguous parameters alone
            model = model.to(memory_format=torch.channels_last)
        torch.manual_seed(1 + rank)
        x = torch.randn(options.batch, 3, options.image, options.image, device=self.device)
        self.x = x.contiguous(memory_format=torch.channels_last)
        self.targets = torch.randint(1000, (options.batch,), device=self.device)
        self.called = VARIANTS[variant][1](model, (self.x, self.targets))
        self.optimizer = torch.optim.SGD(self.called.parameters(), lr=1e-3)

    def step(self, after_forward: Callable[[], Any] = lambda: None) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = F.cross_entropy(self.called(self.x), self.targets)
        after_forward()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def bits(self) -> list[torch.Tensor]:
        losses = [self.step() for _ in range(BITS)]
        grads = [p.grad for p in self.called.parameters() if p.grad is not None]
        return [t.to_local().clone() if hasattr(t, "to_local") else t.clone() for t in (*losses, *grads)]  # type: ignore

    def figures(self, steps: int) -> dict[str, float]:
        for _ in range(WARM_UP):
            self.step()
        self._drain()
        begun = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._drain()
        found = {"step_ms": 1e3 * (time.perf_counter() - begun) / steps}
        if self.device.type != "cuda":
            return found
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        self._drain()
        torch.cuda.reset_peak_memory_stats()
        before, kept = torch.cuda.memory_allocated(), []
        self.step(lambda: kept.append(torch.cuda.memory_allocated() - before))
        return found | {"kept_mib": kept[0] / MIB, "peak_mib": (torch.cuda.max_memory_allocated() - before) / MIB}

    def _drain(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def work(rank: int, count: int, folder: str, options: argparse.Namespace) -> None:
    """One process: all variants; the first one writes the rows."""
    on_gpu = options.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch._dynamo.config.recompile_limit = 64  # a block each
    backend = "nccl" if on_gpu else "gloo"
    distributed.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=count)
    begun = time.perf_counter()
    for name in options.models.split(","):
        of: dict[str, list[torch.Tensor]] = {}
        for variant in options.variants.split(","):
            late = torch.tensor(float(time.perf_counter() - begun > options.max_s), device=options.device)
            distributed.all_reduce(late)
            if late:
                continue
            torch._dynamo.reset()
            run, reference = Run(name, variant, rank, options), VARIANTS[variant][0]
            first = time.perf_counter()
            of[variant] = bits = run.bits()
            row = {"model": name, "variant": variant, "gpus": count, "first_s": time.perf_counter() - first}
            if reference in of:
                same = torch.tensor([float(torch.equal(*pair)) for pair in zip(bits, of[reference], strict=True)])
                same = same.to(options.device)
                distributed.all_reduce(same, distributed.ReduceOp.MIN)
                row |= {"reference": reference, "equal": int(same.sum()), "of": len(same)}
            row |= run.figures(options.steps)
            del run
            gc.collect()
            if not rank:
                head = {"kind": "distributed", "time_utc": utc(), **environment(options.device), "batch": options.batch}
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(head | row) + "\n")
                print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    distributed.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Runs the variants and writes their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--models", default="resnet50", help="comma-separated")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"comma-separated, of {', '.join(VARIANTS)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--batch", type=int, default=64, help="images a GPU")
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--steps", type=int, default=TIMED)
    parser.add_argument("--max-s", type=float, default=float("inf"), help="begin no variant after so many seconds")
    options = parser.parse_args(argv)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.unlink(missing_ok=True)
    count = torch.cuda.device_count() if options.device == "cuda" else 2
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (count, folder, options), nprocs=count)  # pyright: ignore[reportPrivateImportUsage]
    return 0


if __name__ == "__main__":
    sys.exit(main())
