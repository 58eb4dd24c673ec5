"""Whether eager steps of many architectures keep their bits and their budgets on a GPU: the networks of
:mod:`bench.architectures`, in larger sizes BERT, a Llama, a T5 and networks of diffusers, where it is installed, and
any of timm's: ``timm/NAME``, of 16 images.

    python -m bench.architecture_plans --out bench/results/NAME.jsonl [--only bert,timm/dla34] [--measure] [--part 0/8]

Each takes three steps of SGD in fp32 and three under bf16 autocast, plainly twice, by ``gistkit.compress`` and under
plans with budgets (by the card's rates, or measured: cuDNN's workspace is known only then), the larger ones also
plainly with their library's checkpoints. By step:

* ``unequal``: how many losses and gradients have other bits than plain's, ``names``: of some.
* ``of_plain``, ``of_budget``, ``of_predicted``: the highest peak of the three steps, by the CUDA allocator, over
  plain's, the budget and the plan's prediction. Planned bytes count 64 MiB of the device's libraries.
* ``time``: the quickest step, waiting for the device, over plain's. Small networks are bound by the host.
* ``refused``: the least bytes of a budget that cannot be met, in MiB by class; ``error``: any other.

``repeats``: whether plain PyTorch repeats its own bits. Algorithms are deterministic.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gistkit
from bench import architectures
from bench.architectures import NAMED, NETWORKS, STEPS, Batch, Bits, WithLoss, rows, unequal
from bench.rows import environment, read, utc
from gistkit.benchmark.measure import MIB

KIND = "architecture plans"
STEPS_OF: dict[str, tuple[bool, str | None]] = {
    "fp32": (False, None), "bf16": (True, None), "fp32 85%": (False, "85%"), "fp32 65%": (False, "65%"),
    "fp32 40%": (False, "40%"), "bf16 80%": (True, "80%"), "bf16 50%": (True, "50%"),
}  # fmt: skip
"""Of a step: whether under autocast, and its budget; of RIVALS CHECKPOINTS in place of one."""
CHECKPOINTS = "checkpoints"
RIVALS: dict[str, tuple[bool, str | None]] = {
    "fp32 checkpoints": (False, CHECKPOINTS),
    "bf16 checkpoints": (True, CHECKPOINTS),
}
LARGE: dict[str, tuple[str, str, dict[str, Any], tuple[int, int]]] = {
    "bert_base": ("BertConfig", "BertForMaskedLM", {}, (32, 512)),
    "llama_12": ("LlamaConfig", "LlamaForCausalLM",
                 dict(hidden_size=1024, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=4,
                      intermediate_size=2816, vocab_size=16384), (8, 1024)),
    "t5_base": ("T5Config", "T5ForConditionalGeneration",
                dict(d_model=768, d_ff=3072, num_layers=12, num_heads=12, vocab_size=16384, pad_token_id=0,
                     decoder_start_token_id=0), (16, 512)),
}  # fmt: skip
"""Configuration's and model's class, sizes, rows and tokens of the batch, half of whose rows are padded."""
DENOISERS: dict[str, tuple[str, dict[str, Any], tuple[int, ...], dict[str, tuple[int, ...]]]] = {
    "unet_64": ("UNet2DModel",
                dict(sample_size=64, block_out_channels=(128, 256, 256, 512),
                     down_block_types=("DownBlock2D",) * 3 + ("AttnDownBlock2D",),
                     up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * 3), (64, 3, 64, 64), {}),
    "unet_text": ("UNet2DConditionModel",
                  dict(sample_size=64, block_out_channels=(320, 640, 1280, 1280), cross_attention_dim=768),
                  (8, 4, 64, 64), {"encoder_hidden_states": (8, 77, 768)}),
    "sd3_12": ("SD3Transformer2DModel",
               dict(sample_size=64, num_layers=12, num_attention_heads=12, joint_attention_dim=768,
                    caption_projection_dim=768, pooled_projection_dim=768), (16, 16, 64, 64),
               {"encoder_hidden_states": (16, 154, 768), "pooled_projections": (16, 768)}),
}  # fmt: skip
"""Of diffusers: the class, its words, the shape of the images, and those of other inputs."""


TIMM, IMAGES, LARGEST = "timm/", 16, 256
"""How the names of timm's networks begin, the images of a batch, and their largest size."""


class Denoiser(nn.Module):
    """A network of diffusers that gives the mean square of its error."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sample: torch.Tensor, noise: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(sample, **others).sample.float(), noise)


def large(name: str) -> tuple[nn.Module, Batch]:
    """One of LARGE, of DENOISERS or of timm."""
    torch.manual_seed(0)
    if name.startswith(TIMM):
        made = importlib.import_module("timm").create_model(name.removeprefix(TIMM), num_classes=100)
        channels, *sides = made.default_cfg["input_size"]
        model: nn.Module = WithLoss(made)
        shape = IMAGES, channels, *(min(side, LARGEST) for side in sides)
        batch: Batch = {"x": torch.randn(shape), "targets": torch.randint(0, 100, (IMAGES,))}
    elif name in DENOISERS:
        kind, words, shape, others = DENOISERS[name]
        model = Denoiser(getattr(importlib.import_module("diffusers"), kind)(**words))
        batch = {"sample": torch.randn(shape), "noise": torch.randn(shape)}
        batch |= {key: torch.randn(size) for key, size in others.items()}
        batch["timestep"] = torch.randint(0, 1000, shape[:1])
    else:
        transformers, (config, head, words, (rows, tokens)) = importlib.import_module("transformers"), LARGE[name]
        made = getattr(transformers, config)(**words)
        ids = torch.randint(5, made.vocab_size - 1, (rows, tokens))
        batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
        batch["attention_mask"][: rows // 2, -9:] = 0
        model = WithLoss(getattr(transformers, head)(made))
    return model.train().cuda(), {key: x.cuda() for key, x in batch.items()}


def checkpointed(model: nn.Module) -> nn.Module:
    """The network with its library's own checkpoints."""
    inner: Any = model.model
    if isinstance(model, Denoiser):
        inner.enable_gradient_checkpointing()
    elif hasattr(inner, "set_grad_checkpointing"):  # timm's
        inner.set_grad_checkpointing()
    else:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def steps(model: nn.Module, batch: Batch, autocast: bool) -> tuple[list[Bits], int, float]:
    """Losses and gradients of three steps, their peak in bytes, and the quickest one's seconds."""
    optimiser, found, peaks, times = torch.optim.SGD(model.parameters(), lr=1e-3), list[Bits](), [], []
    for index in range(STEPS):
        torch.manual_seed(index)
        optimiser.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(**batch)
        loss.backward()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        peaks.append(torch.cuda.max_memory_allocated())
        grads = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach().cpu(), **grads})
        del loss
        optimiser.step()
    return found, max(peaks), min(times)


def planned(
    fresh: Callable[[], nn.Module], batch: Batch, autocast: bool, budget: str | None, plain: Any, measure: bool
) -> Any:
    """A step's figures beside plain's."""
    bits, plain_peak, plain_s = plain
    model, plan = fresh(), None
    if budget and budget != CHECKPOINTS:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            plan = gistkit.plan(model, batch, loss_fn=lambda loss: loss, budget=budget, measure=measure)
    prepared = checkpointed(model) if budget == CHECKPOINTS else gistkit.compress(model, plan)
    found, peak, seconds = steps(prepared, batch, autocast)
    other = unequal(bits, found)
    row = {"unequal": len(other), "names": other[:NAMED], "of_plain": round(peak / plain_peak, 3)}
    if plan is not None and plan.budget_bytes is not None:
        row |= {"of_budget": round(peak / plan.budget_bytes, 3), "of_predicted": round(peak / plan.peak_bytes, 3)}
        row["budget_mib"] = round(plan.budget_bytes / MIB, 1)
    return {**row, "time": round(seconds / plain_s, 2)}


def row(name: str, *, measure: bool = False) -> dict[str, Any]:
    """One network's row."""
    is_large = name in (*LARGE, *DENOISERS) or name.startswith(TIMM)
    model, batch = large(name) if is_large else architectures.network(name)
    model.cpu()

    def fresh() -> nn.Module:
        gc.collect()
        torch.cuda.empty_cache()
        return copy.deepcopy(model).cuda()

    plain = {autocast: steps(fresh(), batch, autocast) for autocast in (False, True)}
    tensors = sum(map(len, plain[False][0]))
    found: dict[str, Any] = {"kind": KIND, "model": name, "tensors": tensors, "measured": measure}
    found["repeats"] = [not unequal(plain[a][0], steps(fresh(), batch, a)[0]) for a in (False, True)]
    found["plain_mib"] = [round(plain[a][1] / MIB, 1) for a in (False, True)]
    for label, (autocast, budget) in {**STEPS_OF, **(RIVALS if is_large else {})}.items():
        try:
            found[label] = planned(fresh, batch, autocast, budget, plain[autocast], measure)
        except gistkit.BudgetError as error:
            found[label] = {"refused": {k: round(v / MIB, 1) for k, v in error.least_bytes.items()}}
        except Exception as error:  # what should not be
            found[label] = {"error": f"{type(error).__name__}: {error}"[:400]}
    return found


def main(argv: list[str] | None = None) -> int:
    """Writes a row for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join([*LARGE, *DENOISERS, *NETWORKS]))
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--max-s", type=float, default=float("inf"))
    words = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    known = {found["model"] for found in read(words.out)} if words.out.exists() else set()
    part, parts = map(int, words.part.split("/"))
    names = [name for name in words.only.split(",")[part::parts] if name not in known]
    for found in rows(names, words.max_s, partial(row, measure=words.measure), KIND):
        with words.out.open("a") as file:
            file.write(json.dumps({**found, **environment("cuda"), "time_utc": utc()}) + "\n")
        print(found, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
