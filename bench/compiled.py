"""Compiled training steps: ``torch.compile`` beside ``gistkit.compile`` and their peers, in one run.

    python -m bench.compiled --out bench/results/NAME.jsonl [--models resnet50,gpt2] [--confs bf16,fp32] [--max-s 500]

``bf16``: autocast, images in channels_last, batch 128 (gpt2: 16 x 512 tokens); ``fp32``: half of it. Plain SGD, so that
kept bytes are the model's own. ``gpt2-loss`` and ``llama-loss`` have the loss in their forward, as Hugging Face's
models: it is in the graph then, and of the logits bf16 stays where the eager loss outside keeps fp32. Columns of a row:

* ``step_ms``: the median of runs of steps without a synchronisation among them, by their number. Of these and of
  ``host_ms`` those on a quiet core count (:mod:`bench.pace`), ``quiet_runs`` of ``runs``; ``loop_ms``: its pace.
* ``host_ms``: what the host takes to issue a step.
* ``kept_mib``, ``peak_mib``: the CUDA allocator's, less what the step began with. ``whole_peak_mib``: with parameters,
  buffers and batch; ``predicted_peak_mib``: what gistkit's graphs said of it.
* ``cold_s``: the first step with empty caches of Inductor; ``warm_s``: the first step of the same model compiled again.
* ``equal``: how many of the gradients, and the loss, are in every bit those of the row's ``reference``, both from the
  same weights and batch; ``repeats``: those of a second step of the same compiled model, which a network with atomic
  additions does not repeat. ``unequal`` names some.
* ``kernels``, with ``--profile``: what a step runs on the device, calls and microseconds; ``device_ms`` is their sum.

``--mode reduce-overhead`` compiles with CUDA graphs. ``--device cpu`` tries it out. A row that ``--out`` holds is not
run again. Processes that have the same ``--lock FILE`` compile side by side and measure one after the other.

To compile many networks side by side and measure each alone on the card, run it twice with the same ``--caches DIR``:
first with ``--only-compile``, a process a network, then without, one process. The first step is ``cold_s`` in the
first, and ``warm_s``, from another process's caches, in the second.

Inductor chooses a kernel's configuration by its time and keeps the choice in its caches, by the kernel's text. So plain
``torch.compile`` need not repeat its bits from one compile to the next; with ``--share-caches`` kernels of the same
text have the same configuration in all variants, and bits can be compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import nn

import gistkit
from bench.alone import alone
from bench.networks import GPT, Llama
from bench.pace import Timings
from bench.rows import beside, environment, utc
from bench.training import network
from bench.variants import checkpointed
from gistkit.benchmark.measure import MIB
from gistkit.compiled import records_of

MODELS = (
    "resnet50", "vit_small_patch16_224", "vgg16", "efficientnet_b0", "mobilenetv3_large_100", "convnext_tiny",
    "swin_tiny_patch4_window7_224", "densenet121", "gpt2", "gpt2-loss", "llama-loss",
)  # fmt: skip
CONFS = ("bf16", "fp32")
BATCH, TOKENS, LENGTH = 128, 50304, 512
WARM_UP, TIMED, RUNS = 5, 10, 5
BUDGETS = "70%", "60%", "50%", "40%", "30%"
NAMED = 8
SLEEP_CYCLES = 2_000_000_000


class Variant(NamedTuple):
    """How a model becomes what is called, what its bits are compared with, PyTorch's own memory budget, and
    Inductor's settings: every bf16 value rounded where eager PyTorch does; no choice of kernels by their time; its own
    pass that keeps what backward reads in fp8."""

    prepare: Callable[..., Any]
    reference: str = ""
    activation_budget: float = 1.0
    emulate_casts: bool = False
    deterministic: bool = False
    fp8_pass: bool = False


def _gistkit(**words: Any) -> Callable[..., Any]:
    return lambda model, **options: gistkit.compile(model, **words, **options)


def _eager(prepare: Callable[[nn.Module], Any]) -> Callable[..., Any]:
    return lambda model, **_: prepare(model)


class _SavedOnCpu(nn.Module):
    """A model whose forward saves to pinned memory of the host, by PyTorch's own ``save_on_cpu``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=x.is_cuda):
            return self.model(x, *targets)


FP8_PASS = {
    "activation_quantization_aten_pass": {
        "allowed_dtypes": "torch.bfloat16;torch.float32",
        "size_in_mb": 1,
        "use_scaling": True,
        "exclude_primals": True,
    }
}
"""PyTorch's pass with a scale for each row; without one it has a bug."""


VARIANTS = {
    "eager": Variant(_eager(lambda model: model)),
    "compile": Variant(torch.compile, "compile"),
    "compile again": Variant(torch.compile, "compile"),
    "gistkit": Variant(_gistkit(), "compile"),
    "gistkit reassociated": Variant(_gistkit(fidelity="reassociated"), "compile"),
    "gistkit fp8s": Variant(_gistkit(lossy="fp8s")),
    "gistkit 75%": Variant(_gistkit(budget="75%"), "compile"),
    **{f"gistkit reassociated {b}": Variant(_gistkit(fidelity="reassociated", budget=b), "compile") for b in BUDGETS},
    **{f"gistkit fp8s {b}": Variant(_gistkit(lossy="fp8s", budget=b)) for b in BUDGETS},
    "compile emulated": Variant(torch.compile, "compile emulated", emulate_casts=True),
    "gistkit emulated": Variant(_gistkit(), "compile emulated", emulate_casts=True),
    "compile deterministic": Variant(torch.compile, "compile deterministic", deterministic=True),
    "compile deterministic again": Variant(torch.compile, "compile deterministic", deterministic=True),
    "gistkit deterministic": Variant(_gistkit(), "compile deterministic", deterministic=True),
    "compile 0.6": Variant(torch.compile, "compile", 0.6),
    "compile 0.3": Variant(torch.compile, "compile", 0.3),
    "compile fp8 pass": Variant(torch.compile, fp8_pass=True),
    "checkpoint": Variant(_eager(checkpointed), "eager"),
    "compile checkpoint": Variant(lambda model, **options: torch.compile(checkpointed(model), **options), "compile"),
    "save_on_cpu": Variant(_eager(_SavedOnCpu), "eager"),
    "gistkit eager": Variant(_eager(gistkit.compress), "eager"),
}
USUAL = "eager,compile,gistkit,gistkit reassociated,gistkit fp8s"
Bits = dict[str, torch.Tensor]


class WithLoss(nn.Module):
    """A language model that gives its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x).flatten(0, -2), targets.flatten())


TEXT = {
    "gpt2": GPT,
    "gpt2-loss": lambda *sizes: WithLoss(GPT(*sizes)),
    "llama-loss": lambda *sizes: WithLoss(Llama(*sizes)),
}


def batch_of(name: str, conf: str, options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one step, the same in every row."""
    torch.manual_seed(1)
    count = options.batch or BATCH // (1 if conf == "bf16" else 2)
    if name in TEXT:
        rows = max(1, count // 8)
        return tuple(torch.randint(TOKENS, (rows, LENGTH), device=options.device) for _ in range(2))  # type: ignore
    x = torch.randn(count, 3, options.image, options.image, device=options.device)
    x = x.contiguous(memory_format=torch.channels_last) if conf == "bf16" else x
    return x, torch.randint(1000, (count,), device=options.device)


def model_of(name: str, conf: str, device: str) -> nn.Module:
    """The network with the same weights in every row; no dropout, whose draws differ between compiled and eager."""
    torch.manual_seed(0)
    model: Any = TEXT[name](TOKENS, LENGTH) if name in TEXT else network(name)
    model = model.to(device).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.to(memory_format=torch.channels_last) if conf == "bf16" and name not in TEXT else model


class Run:
    """One variant of a network: its step, and what is measured of it."""

    def __init__(self, name: str, conf: str, variant: Variant, options: argparse.Namespace) -> None:
        self.device, self.steps = options.device, options.steps
        self.model = model_of(name, conf, self.device)
        self.x, self.targets = batch_of(name, conf, options)
        words = {"mode": options.mode} if options.mode else {}
        self.called = variant.prepare(self.model, **words)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.narrow = (lambda: torch.autocast(self.device, torch.bfloat16)) if conf == "bf16" else nullcontext

    def step(self, after_forward: Callable[[], Any] = lambda: None, update: bool = True) -> torch.Tensor:
        """Forward, loss, backward and the optimiser's step; the gradients stay until the next."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.compiler.cudagraph_mark_step_begin()
        with self.narrow():
            if isinstance(self.model, WithLoss):
                loss = self.called(self.x, self.targets)
            else:
                loss = F.cross_entropy(self.called(self.x).flatten(0, -2), self.targets.flatten())
        after_forward()
        loss.backward()
        if update:
            self.optimizer.step()
        return loss.detach()

    def drain(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any]) -> float:
        """Of the work, the device drained before and after."""
        self.drain()
        begun = time.perf_counter()
        work()
        self.drain()
        return time.perf_counter() - begun

    def bits(self) -> Bits:
        """Loss and gradients of a step on the weights as they were made."""
        loss = self.step(update=False)
        named = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        return {"loss": loss.clone(), **named}

    def times(self) -> dict[str, float]:
        """Steps that do not wait for each other, and the host's share of one. Timings on a quiet core count."""
        for _ in range(WARM_UP):
            self.step()
        self.drain()
        steps, hosts = Timings(), Timings()
        for _ in range(RUNS):
            steps.take(lambda: self.seconds(lambda: [self.step() for _ in range(self.steps)]))
        for _ in range(RUNS):
            if self.device == "cuda":
                torch.cuda._sleep(SLEEP_CYCLES)
            hosts.take(self.step)  # one: more of them would fill the queue of launches, and wait
            self.drain()
        paces = {name: steps.figures[name] for name in ("quiet_runs", "runs", "loop_ms")}
        return {"step_ms": 1e3 * steps.median / self.steps, "host_ms": 1e3 * hosts.median, **paces}

    def memory(self) -> dict[str, float]:
        """Bytes kept when the forward ends, and the peak, less what was there before."""
        if self.device != "cuda":
            return {}
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        self.drain()
        before, kept = torch.cuda.memory_allocated(), []
        torch.cuda.reset_peak_memory_stats()
        self.step(lambda: kept.append(torch.cuda.memory_allocated() - before))
        self.drain()
        peak = (torch.cuda.max_memory_allocated() - before) / MIB
        held = (*self.model.parameters(), *self.model.buffers(), self.x, self.targets)
        found = {
            "kept_mib": kept[0] / MIB,
            "peak_mib": peak,
            "whole_peak_mib": peak + sum(x.nbytes for x in held) / MIB,
        }
        if records := records_of(self.called):
            found["predicted_peak_mib"] = max(r.peak_bytes for r in records) / MIB
            found["predicted_plain_mib"] = max(r.plain_peak_bytes for r in records) / MIB
        return found

    def kernels(self) -> list[tuple[str, int, float]]:
        """What a step runs on the device: names, calls and microseconds, the longest first."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.step()
            self.drain()
        rows = [(e.key[:160], e.count, e.self_device_time_total) for e in profile.key_averages()]
        return sorted(rows, key=lambda row: -row[2])


@contextmanager
def caches(folder: Path | None) -> Iterator[None]:
    """Inductor's caches in a folder, or in an empty one that goes when this is closed."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory() as empty:
        os.environ[name] = str(folder or empty)
        try:
            yield
        finally:
            os.environ.pop(name) if before is None else os.environ.update({name: before})


@contextmanager
def settings_of(variant: Variant) -> Iterator[None]:
    """PyTorch's own settings, as the variant has them."""
    budget = torch._functorch.config.patch(activation_memory_budget=variant.activation_budget)
    inductor: dict[str, Any] = {
        "emulate_precision_casts": variant.emulate_casts,
        "deterministic": variant.deterministic,
        "post_grad_fusion_options": FP8_PASS if variant.fp8_pass else {},
    }
    with budget, torch._inductor.config.patch(inductor):
        yield


def row_of(name: str, conf: str, label: str, options: argparse.Namespace) -> tuple[dict[str, Any], Bits]:
    """The figures of a row, and its loss and gradients."""
    variant, folder = VARIANTS[label], None
    if options.caches:
        own = () if options.share_caches else (*label.split(), options.mode)
        folder = options.caches / "-".join((name, conf, *own))
    first_step = "warm_s" if folder and folder.exists() else "cold_s"
    with caches(folder), settings_of(variant):
        torch._dynamo.reset()
        first = Run(name, conf, variant, options)
        found: dict[str, Any] = {first_step: first.seconds(lambda: first.step(update=False))}
        if options.only_compile:
            return found, {}
        with alone(options.lock):
            bits = first.bits()
            found["repeats"] = len(bits) - len(unequal(bits, first.bits()))
            found |= first.times() | first.memory()
            if options.profile:
                found["kernels"] = first.kernels()
                found["device_ms"] = sum(us for *_, us in found["kernels"]) / 1e3
        if options.warm:
            torch._dynamo.reset()
            again = Run(name, conf, variant, options)
            found["warm_s"] = again.seconds(lambda: again.step(update=False))
        return found, bits


def compared(bits: Bits, reference: Bits) -> dict[str, Any]:
    """How many tensors are equal in every bit, of how many, and the largest relative error of the others."""
    others = unequal(bits, reference)
    errors = {n: float((bits[n] - reference[n]).norm() / reference[n].norm().clamp_min(1e-30)) for n in others}
    worst = max(errors, key=errors.__getitem__) if errors else ""
    counts = {"equal": len(bits) - len(others), "of": len(bits), "unequal": others[:NAMED]}
    return counts | {"worst": worst, "worst_error": errors.get(worst, 0.0)}


def unequal(bits: Bits, reference: Bits) -> list[str]:
    """The names of tensors that differ in a bit."""
    return [name for name, tensor in bits.items() if not torch.equal(tensor, reference[name])]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.compiled", description="Compiled training steps beside their peers.")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file; rows that it holds are not run again")
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated, timm's names, gpt2 or llama-loss")
    parser.add_argument("--confs", default=",".join(CONFS), help="comma-separated: bf16, fp32")
    known = ", ".join(VARIANTS).replace("%", "%%")
    parser.add_argument("--variants", default=USUAL, help=f"comma-separated, of {known}")
    parser.add_argument("--mode", default="", help="torch.compile's mode: reduce-overhead, max-autotune")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--batch", type=int, default=0, help="instead of the configuration's")
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--steps", type=int, default=TIMED)
    parser.add_argument("--lock", type=Path, help="file; who has the same one measures one after the other")
    parser.add_argument("--warm", action="store_true", help="compile each a second time, from the caches")
    parser.add_argument("--caches", type=Path, help="folder for Inductor's caches, which stays")
    parser.add_argument("--share-caches", action="store_true", help="one folder for a network's variants")
    parser.add_argument("--only-compile", action="store_true", help="only the first step of each")
    parser.add_argument("--profile", action="store_true", help="each row has the kernels of a step and their times")
    parser.add_argument("--max-s", type=float, default=float("inf"), help="begin no row after so many seconds")
    return parser.parse_args(argv)


def rows_of(path: Path) -> set[tuple[str, ...]]:
    """Which rows a file holds."""
    if not path.exists():
        return set()
    return {_key(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()}


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return (row["model"], row["conf"], row["variant"], row["mode"])


def main(argv: list[str] | None = None) -> int:
    """The command line; exit status 1 where a row failed."""
    options = arguments(argv)
    deadline, failed, held = time.monotonic() + options.max_s, False, rows_of(options.out)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    cases = [(model, conf) for conf in options.confs.split(",") for model in options.models.split(",")]
    with open(options.out, "a", encoding="utf-8") as file:
        for model, conf in cases:
            bits: dict[str, Bits] = {}
            figures: dict[str, dict[str, Any]] = {}
            for name in options.variants.split(","):
                row = {"model": model, "conf": conf, "variant": name, "mode": options.mode}
                if _key(row) in held:
                    continue
                if time.monotonic() > deadline:
                    print(f"bench.compiled: not run: {model} {conf} {name}", file=sys.stderr)
                    continue
                row |= {"kind": "compiled", "time_utc": utc(), **environment(options.device)}
                reference = VARIANTS[name].reference
                try:
                    found, bits[name] = row_of(model, conf, name, options)
                    row |= found
                    if bits.get(reference) and reference != name:
                        row |= {"reference": reference, **compared(bits[name], bits[reference])}
                except Exception as error:
                    row, failed = {**row, "error": f"{type(error).__name__}: {error}"[:2000]}, True
                figures[name] = row
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(line_of(row, figures.get("compile", {})), flush=True)
                torch._dynamo.reset()
                gc.collect()
                if options.device == "cuda":
                    torch.cuda.empty_cache()
    return int(failed)


def line_of(row: dict[str, Any], compiled: dict[str, Any]) -> str:
    """A row in words, beside plain ``torch.compile``'s."""
    head = f"{row['model']} {row['conf']} {row['variant']}: "
    if "error" in row:
        return head + row["error"][:300]
    text = beside(row, compiled, ("step_ms", "host_ms", "device_ms", "kept_mib", "peak_mib", "cold_s", "warm_s"))
    same = f", {row['equal']} of {row['of']} tensors equal" if "equal" in row else ""
    same += f", {row['repeats']} repeat" if "repeats" in row else ""
    worst = f" (worst {row['worst']}: {row['worst_error']:.1e})" if row.get("worst") else ""
    return head + text + same + worst


if __name__ == "__main__":
    sys.exit(main())
