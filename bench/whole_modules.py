"""Budgets met by whole modules that run anew, beside calls that do and the libraries' own checkpoints, on a GPU.

    python -m bench.whole_modules --out bench/results/NAME.jsonl [--only gpt2,llama_12] [--budgets 80%,60%] [--max-s 99]

Each network takes steps under bf16 autocast: plainly, with its library's checkpoints of every block, and under plans
made with measured times: `optimal`'s, and what it is without whole modules. All of them step in turn, six steps at a
time that do not wait for the device, six times. By step:

* ``ms``, ``median_ms``: of the quickest six steps, and of the median; ``time``, ``median_time``: over plain's.
* ``of_plain``, ``of_budget``: the highest peak of four steps by the CUDA allocator over plain's, and over the budget.
* ``modules``: how many run anew; ``predicted_ms``; ``bits``: whether loss and gradients are plain's, if plain
  ``repeats`` its own.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import gistkit
from bench.architecture_plans import checkpointed
from bench.architectures import WithLoss
from bench.rows import environment, utc
from gistkit.benchmark.measure import MIB
from gistkit.planning import choose

KIND = "whole modules"
LANGUAGE: dict[str, tuple[str, str, dict[str, Any], tuple[int, int]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel",
             dict(attn_pdrop=0, resid_pdrop=0, embd_pdrop=0, use_cache=False), (8, 1024)),
    "bert_base": ("BertConfig", "BertForMaskedLM", {}, (32, 512)),
    "llama_12": ("LlamaConfig", "LlamaForCausalLM",
                 dict(hidden_size=1024, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=4,
                      intermediate_size=2816, vocab_size=16384, use_cache=False), (8, 1024)),
}  # fmt: skip
IMAGES = {"vit_small": ("vit_small_patch16_224", 128), "swin_tiny": ("swin_tiny_patch4_window7_224", 64)}
STEPS, TURNS = 6, 6
Batch = dict[str, torch.Tensor]


def network(name: str) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    if name in IMAGES:
        kind, rows = IMAGES[name]
        batch = {"x": torch.randn(rows, 3, 224, 224), "targets": torch.randint(1000, (rows,))}
        model: nn.Module = WithLoss(importlib.import_module("timm").create_model(kind))
    else:
        transformers, (config, head, words, shape) = importlib.import_module("transformers"), LANGUAGE[name]
        model = WithLoss(getattr(transformers, head)(getattr(transformers, config)(**words)))
        ids = torch.randint(5, 1000, shape)
        batch = {"input_ids": ids, "labels": ids.clone()}
    return model.train(), {key: x.cuda() for key, x in batch.items()}


def step(model: nn.Module, batch: Batch) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(**batch)
    loss.backward()
    return loss.detach()


def peak_and_bits(model: nn.Module, batch: Batch, apart_bytes: int) -> tuple[int, list[torch.Tensor]]:
    """The peak of four steps without ``apart_bytes``, loss and gradients of the last, on the host."""
    peaks, found = [], []
    for seed in range(4):
        torch.manual_seed(seed)
        torch.cuda.reset_peak_memory_stats()
        found = [step(model, batch)]
        peaks.append(torch.cuda.max_memory_allocated() - apart_bytes)
    bits = [t.cpu() for t in (*found, *(p.grad for p in model.parameters() if p.grad is not None))]
    model.zero_grad(set_to_none=True)
    return max(peaks), bits


def plans(model: nn.Module, batch: Batch, budgets: list[str]) -> Iterator[tuple[str, gistkit.Plan]]:
    """With and without whole modules, each within every budget that can be met."""

    def loss_fn(loss: torch.Tensor) -> torch.Tensor:
        return loss

    with torch.autocast("cuda", torch.bfloat16):
        times = gistkit.measure(model, batch, loss_fn=loss_fn)
        for budget in budgets:
            for how in ("whole modules", "call by call"):
                without = mock.patch.object(choose, "_or_blocks", lambda plan, *_: plan)
                try:
                    with without if how == "call by call" else nullcontext():
                        plan = gistkit.plan(model, batch, loss_fn=loss_fn, budget=budget, measure=times)
                except gistkit.BudgetError as error:
                    print(budget, how, error)
                    continue
                yield f"{budget}, {how}", plan


def rows(name: str, budgets: list[str]) -> Iterator[dict[str, Any]]:
    plain, batch = network(name)
    made: dict[str, tuple[nn.Module, dict[str, Any]]] = {}

    def add(kind: str, model: nn.Module, **about: Any) -> tuple[int, list[torch.Tensor]]:
        own = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *batch.values()))
        made[kind] = model, about
        return peak_and_bits(model, batch, torch.cuda.memory_allocated() - own)

    plain_bytes, expected = add("plain", copy.deepcopy(plain).cuda())
    again = peak_and_bits(made["plain"][0], batch, 0)[1]
    about = {"repeats": all(map(torch.equal, expected, again))}
    made["plain"][1].update(about, peak_mib=round(plain_bytes / MIB))
    twins: list[tuple[str, nn.Module, gistkit.Plan | None]] = []
    twins.append(("checkpoints", checkpointed(copy.deepcopy(plain).cuda()), None))
    for kind, plan in plans(copy.deepcopy(plain).cuda(), batch, budgets):
        twins.append((kind, gistkit.compress(copy.deepcopy(plain).cuda(), plan), plan))
    for kind, twin, plan in twins:
        peak, bits = add(kind, twin, **about)
        made[kind][1].update(of_plain=round(peak / plain_bytes, 3), bits=all(map(torch.equal, expected, bits)))
        if plan is not None and plan.budget_bytes:
            figures = {"budget_mib": round(plan.budget_bytes / MIB), "of_budget": round(peak / plan.budget_bytes, 3)}
            made[kind][1].update(figures, modules=len(plan.modules), predicted_ms=round(1e3 * plan.step_s, 1))
    taken: dict[str, list[float]] = {kind: [] for kind in made}
    for _ in range(TURNS):
        for kind, (model, _) in made.items():
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(STEPS):
                step(model, batch)
            torch.cuda.synchronize()
            taken[kind].append(1e3 * (time.perf_counter() - begun) / STEPS)
            model.zero_grad(set_to_none=True)
    plain_ms, plain_median_ms = min(taken["plain"]), statistics.median(taken["plain"])
    for kind, (_, figures) in made.items():
        ms, median_ms = min(taken[kind]), statistics.median(taken[kind])
        times = {"ms": round(ms, 1), "median_ms": round(median_ms, 1), "time": round(ms / plain_ms, 3)}
        yield {"model": name, "step": kind, **times, "median_time": round(median_ms / plain_median_ms, 3), **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join((*LANGUAGE, *IMAGES)))
    parser.add_argument("--budgets", default="80%,60%")
    parser.add_argument("--max-s", type=float, default=500)
    options = parser.parse_args()
    end = time.monotonic() + options.max_s
    for name in options.only.split(","):
        if time.monotonic() > end:
            print(name, "not run: no time")
            continue
        for row in rows(name, options.budgets.split(",")):
            with options.out.open("a", encoding="utf-8") as out:
                out.write(
                    json.dumps({"kind": KIND, "utc": utc(), **environment("cuda"), "autocast": "bf16", **row}) + "\n"
                )
            print(row, flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
