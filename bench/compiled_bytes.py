"""Bytes between forward and backward under ``torch.compile``, plain and with rebuilds, without running a step.

    python -m bench.compiled_bytes --out bench/results/NAME.jsonl [--models resnet50,vit] [--dtypes bf16,fp32]

The joint graph of each network is traced as ``torch.compile`` traces it (channels_last, training mode, Inductor's
decompositions and joint passes) and cut twice: by PyTorch's min-cut, and by gistkit: joint rewrites, the same min-cut,
rebuilds. Counted are storages that backward alone keeps alive, masks and max-pools' maps in 1 and 4 bits on gistkit's
side. Nothing is compiled or run, so a CPU is enough; norms are computed in fp32 under autocast as on CUDA, but the
attention is a CPU's; rebuilds are chosen as for a GPU. ``reads`` in a row: bytes that rebuilds read in backward, of
which plain reads ``rebuilt_bytes``. ``kept_of_saved_bytes``: if only what PyTorch's cut keeps may be kept, and small
tensors; ``kept_any_bits_bytes``: with rebuilds that are not bitwise by construction; ``kept_unlimited_bytes``: without
limits to reads, depth and time. Needs timm for all but ``gpt``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import fx, nn

from bench.networks import GPT
from bench.rows import environment, utc
from gistkit.benchmark.measure import MIB
from gistkit.compiled import compat, pools
from gistkit.compiled.forms.packing import own_tensors
from gistkit.compiled.partitioner import SHARES
from gistkit.compiled.rebuilds import rounding
from gistkit.compiled.rebuilds.flow import describe
from gistkit.compiled.recompute import copied
from gistkit.compiled.split import Pair, storage_bytes, storage_of, value
from gistkit.planning.flow import UNKEPT, Flow, Limits, Value
from gistkit.planning.rebuilds import Choice, choose

TIMM = {
    "resnet50": "resnet50", "vgg16": "vgg16", "efficientnet": "efficientnet_b0", "mobilenetv3": "mobilenetv3_large_100",
    "convnext": "convnext_tiny", "vit": "vit_small_patch16_224", "swin": "swin_tiny_patch4_window7_224",
    "densenet": "densenet121",
}  # fmt: skip
MODELS = (*TIMM, "gpt")
LARGEST = 10


class _Done(Exception):
    """The graph has been looked at; nothing is to be compiled."""


class _Look(compat.partitioner_base()):
    """Calls ``look`` with the joint graph and the partitioner's words, then ends compilation."""

    def __init__(self, look: Callable[..., None]) -> None:
        self.look = look

    def uuid(self) -> Any:
        return None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **words: Any) -> Any:
        self.look(gm, joint_inputs, words)
        raise _Done


def network(name: str, rows: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A network in training mode, its batch and labels."""
    if name == "gpt":
        return GPT().train(), torch.zeros(rows, 1024, dtype=torch.long), torch.zeros(rows, 1024, dtype=torch.long)
    model = importlib.import_module("timm").create_model(TIMM[name]).train().to(memory_format=torch.channels_last)
    images = torch.zeros(rows, 3, 224, 224).to(memory_format=torch.channels_last)
    return model, images, torch.zeros(rows, dtype=torch.long)


@contextmanager
def norms_in_fp32() -> Iterator[None]:
    """Layer norms cast to fp32, as CUDA's autocast has them."""
    plain = F.layer_norm

    def wide(x: torch.Tensor, *words: Any, **named: Any) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return plain(x.float(), *words, **named)

    F.layer_norm = wide
    try:
        yield
    finally:
        F.layer_norm = plain


def looked_at(name: str, dtype: str, rows: int, look: Callable[..., None]) -> None:
    """Trace one step of a network and call ``look(joint graph, inputs, words)``."""
    model, x, y = network(name, rows)

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            return F.cross_entropy(model(x).flatten(0, -2).float(), y.flatten())

    torch._dynamo.reset()
    seen: list[bool] = []

    def once(*words: Any) -> None:
        look(*words)
        seen.append(True)

    try:
        with norms_in_fp32():
            torch.compile(loss, fullgraph=True, options={"custom_partitioner_fn": _Look(once)})(model, x, y)  # type: ignore
    except Exception:
        if not seen:
            raise


def plain_bytes(pair: Pair) -> int:
    """Bytes of storages that backward alone keeps alive."""
    return sum({storage_of(node): storage_bytes(node) for node in own_tensors(pair)}.values())


def kept_bytes(flow: Flow, limits: Limits) -> int:
    """Bytes of the storages that are kept under limits, packed."""
    return flow.kept_bytes(choose(flow, limits).kept)


def row(name: str, dtype: str, rows: int, limits: Limits) -> dict[str, Any]:
    """One network's row."""
    found: dict[str, Any] = {}

    def look(gm: fx.GraphModule, inputs: Any, words: dict[str, Any]) -> None:
        results = words["num_fwd_outputs"]
        plain = Pair(*compat.min_cut(copied(gm), inputs, **words), results)
        pools.rewritten(gm)
        pair = Pair(*compat.min_cut(gm, inputs, **words), results)
        free = replace(limits, depth=10**6, reads=1e9, shares=(float("inf"),))
        began = time.perf_counter()
        static = words.get("static_lifetime_input_indices")
        flow, any_bits = describe(pair, static, limits), replace(limits, bitwise=False)
        choice = choose(flow, limits)
        chosen_in_s = round(time.perf_counter() - began, 3)
        found.update(
            plain_bytes=plain_bytes(plain), packed_bytes=flow.plain_bytes(), kept_bytes=kept_bytes(flow, limits),
            rebuilt_bytes=sum(c.saved_bytes for c in choice.cones), reads=sum(c.read_bytes for c in choice.cones),
            cones=len(choice.cones), chosen_in_s=chosen_in_s,
            kept_of_saved_bytes=kept_bytes(of_saved(flow, limits), limits),
            kept_any_bits_bytes=kept_bytes(describe(pair, static, any_bits), any_bits),
            kept_unlimited_bytes=kept_bytes(flow, free),
            largest=largest(pair, choice),
        )  # fmt: skip

    looked_at(name, dtype, rows, look)
    return {"kind": "compiled_bytes", "model": name, "dtype": dtype, "batch": rows, **found}


def of_saved(flow: Flow, limits: Limits) -> Flow:
    """The flow of which only what PyTorch's cut keeps, and small tensors, may be kept."""
    saved = {v.storage for v in flow.needed()}

    def barred(v: Value) -> bool:
        return v.storage not in saved and v.weight >= limits.least_bytes

    return replace(flow, values={n: replace(v, weight=UNKEPT) if barred(v) else v for n, v in flow.values.items()})


def largest(pair: Pair, choice: Choice) -> list[dict[str, Any]]:
    """The largest storages that are still kept, and why."""
    named = {node.name: node for node in pair.forward.graph.nodes}
    kept = [(named[name], reason) for name, reason in zip(choice.kept, choice.reasons, strict=True)]
    kept.sort(key=lambda pair: -storage_bytes(pair[0]))
    return [
        {"name": n.name, "op": str(n.target), "shape": [compat.hint(d) for d in value(n).shape],
         "dtype": str(value(n).dtype).removeprefix("torch."), "bytes": storage_bytes(n), "reason": reason}
        for n, reason in kept[:LARGEST]
    ]  # fmt: skip


def shown(rows: list[dict[str, Any]]) -> Table:
    """The rows as a table."""
    table = Table(
        "network", "dtype", "plain MiB", "packed", "kept", "ratio", "of saved", "any bits", "no limits", "read", "s"
    )
    for r in rows:
        table.add_row(
            r["model"], r["dtype"], f"{r['plain_bytes'] / MIB:,.0f}", f"{r['packed_bytes'] / MIB:,.0f}",
            f"{r['kept_bytes'] / MIB:,.0f}", f"{r['plain_bytes'] / r['kept_bytes']:.2f}x", 
            *(f"{r[f'kept_{k}_bytes'] / MIB:,.0f}" for k in ("of_saved", "any_bits", "unlimited")),
            f"{r['reads'] / MIB:,.0f}", f"{r['chosen_in_s']:.1f}",
        )  # fmt: skip
    return table


def main(argv: list[str] | None = None) -> int:
    """Writes a row for each network and dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--batch", type=int, help="rows of a batch; 128 in bf16 and 64 in fp32, 8 of gpt")
    parser.add_argument("--depth", type=int, default=Limits.depth)
    parser.add_argument("--reads", type=float, default=Limits.reads)
    words = parser.parse_args(argv)
    limits = Limits(words.depth, words.reads, shares=SHARES["bitwise"])
    rounding.rounds_within_kernels = lambda pair: True  # as for a GPU
    rows = []
    for dtype in words.dtypes.split(","):
        for name in words.models.split(","):
            batch = words.batch or (8 if name == "gpt" else 128 if dtype == "bf16" else 64)
            rows.append(row(name, dtype, batch, limits) | {"utc": utc(), **environment("cpu")})
            print(json.dumps(rows[-1]), flush=True)
            if words.out:
                with open(words.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    Console(file=sys.stderr, width=120).print(shown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
