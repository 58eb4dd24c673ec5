"""Memory traffic of a compiled training step, plain and under gistkit, read from Inductor's code for an H200.

    python -m bench.compiled_traffic [--blocks resnet,vit] [--classes bitwise,reassociated,fp8s] [--batch 128]

No GPU is needed: a few blocks of each network, bf16 under autocast, are lowered on fake tensors (torch 2.13,
:mod:`tests.support.gpu_code`) and the code is read. A kernel of Triton moves each buffer that it names once, and once
for each of its loops that loads it, where it exceeds the 50 MiB of L2; a call of a library moves its operands and
results once. ``ms`` is that at 4.0 TB/s and 2 us a launch, for the kernels of Triton alone. Shown are the sums, what
backward is given, and the kernels by the difference of their bytes. A kernel is known by its text.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from bench.compiled_bytes import norms_in_fp32
from gistkit.compiled import Settings, record
from gistkit.compiled.custom import Partitioner
from gistkit.compiled.forms import narrow
from gistkit.compiled.rebuilds import rounding
from gistkit.planning.forms.options import FIDELITIES

L2_BYTES, BYTES_A_S, LAUNCH_S = 50 << 20, 4.0e12, 2e-6
WIDTHS = {
    "bf16": 2,
    "fp16": 2,
    "fp32": 4,
    "fp64": 8,
    "fp8e4nv": 1,
    "i1": 1,
    "i8": 1,
    "u8": 1,
    "i16": 2,
    "i32": 4,
    "i64": 8,
}
DTYPES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int64": 8,
}
NAME, SHAPE = r"(\w+)", r"\(((?:\d+, ?)*\d*)\)"


class Bottleneck(nn.Module):
    """ResNet-50's block of the first stage."""

    def __init__(self, wide: int = 256, narrow: int = 64) -> None:
        super().__init__()
        sizes = (wide, narrow, 1), (narrow, narrow, 3), (narrow, wide, 1)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, k, padding=k // 2, bias=False) for a, b, k in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _ in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for conv, norm in zip(self.convs[:2], self.norms[:2], strict=True):  # type: ignore[index]
            y = F.relu(norm(conv(y)))
        return F.relu(self.norms[2](self.convs[2](y)) + x)


class Inverted(nn.Module):
    """MBConv with squeeze and excitation, as in EfficientNet (SiLU) and MobileNetV3 (hardswish)."""

    def __init__(self, narrow: int = 40, wide: int = 240, act: Any = F.silu, gate: Any = torch.sigmoid) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(narrow, wide, 1, bias=False), nn.Conv2d(wide, narrow, 1, bias=False)
        self.depthwise = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (wide, wide, narrow))
        self.reduce, self.expand = nn.Conv2d(wide, wide // 24, 1), nn.Conv2d(wide // 24, wide, 1)
        self.act, self.gate = act, gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.norms[0](self.up(x)))
        y = self.act(self.norms[1](self.depthwise(y)))
        y = y * self.gate(self.expand(self.act(self.reduce(y.mean((2, 3), keepdim=True)))))
        return self.norms[2](self.down(y)) + x


class ConvNeXt(nn.Module):
    """ConvNeXt's block with its layer scale."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width, 1e-6)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(F.gelu(self.up(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))))
        return x + (y * self.gamma).permute(0, 3, 1, 2)


class Encoder(nn.Module):
    """A block of ViT-S, or of GPT-2 where it is causal."""

    def __init__(self, width: int = 384, causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2, self.causal = nn.LayerNorm(width), nn.LayerNorm(width), causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh" if self.causal else "none"))


class Patches(nn.Module):
    """An image as tokens; with positions, in fp32, so is all that blocks add to it."""

    def __init__(self, *positions: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(positions)) if positions else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(2).transpose(1, 2)
        return x if self.positions is None else x + self.positions


def mobile() -> nn.Module:
    """A block of MobileNetV3."""
    return Inverted(act=F.hardswish, gate=F.hardsigmoid)


BLOCKS: dict[str, Any] = {
    "resnet": lambda: nn.Sequential(nn.Conv2d(3, 256, 4, 4, bias=False), *(Bottleneck() for _ in range(3))),
    "vit": lambda: nn.Sequential(nn.Conv2d(3, 384, 16, 16), Patches(), Encoder(), Encoder(), nn.LayerNorm(384)),
    "vit-fp32": lambda: nn.Sequential(
        nn.Conv2d(3, 384, 16, 16), Patches(196, 384), *(Encoder() for _ in range(4)), nn.LayerNorm(384)
    ),
    "gpt": lambda: nn.Sequential(
        nn.Conv2d(3, 768, 16, 16), Patches(), Encoder(768, True), Encoder(768, True), nn.LayerNorm(768)
    ),
    "convnext": lambda: nn.Sequential(nn.Conv2d(3, 96, 4, 4), ConvNeXt(), ConvNeXt()),
    "efficientnet": lambda: nn.Sequential(nn.Conv2d(3, 40, 4, 4, bias=False), Inverted(), Inverted()),
    "mobilenetv3": lambda: nn.Sequential(nn.Conv2d(3, 40, 4, 4, bias=False), mobile(), mobile()),
}


@dataclass
class Traffic:
    """Bytes of Triton's kernels by their text, with names and launches, and of libraries' calls; ``given``: bytes of
    backward's inputs."""

    moved: Counter[str] = field(default_factory=Counter)
    names: dict[str, str] = field(default_factory=dict)
    launches: int = 0
    library: int = 0

    @property
    def triton(self) -> int:
        """Bytes of all of Triton's kernels."""
        return sum(self.moved.values())

    @property
    def ms(self) -> float:
        """Time of Triton's kernels, estimated."""
        return 1e3 * (self.triton / BYTES_A_S + self.launches * LAUNCH_S)

    def read(self, code: str) -> None:
        """Add a graph's code."""
        sources = dict(re.findall(r"(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", code, re.S))
        counts: dict[str, int] = {}
        widths: dict[str, int] = {}
        for line in code[code.index("def call(") :].splitlines():
            line = line.strip()
            if made := re.match(rf"{NAME} = empty_strided_cuda\({SHAPE}, .*torch\.(\w+)\)", line):
                counts[made[1]], widths[made[1]] = _numel(made[2]), DTYPES.get(made[3], 4)
            elif known := re.match(rf"assert_size_stride\({NAME}, {SHAPE}", line):
                counts.setdefault(known[1], _numel(known[2]))
                if "'torch.ops" in line:
                    self.library += counts[known[1]] * widths.get(known[1], 2)
            elif (again := re.match(rf"{NAME} = (?:reinterpret_tensor\()?{NAME}\b(?!\[)", line)) and again[2] in counts:
                counts[again[1]], widths[again[1]] = counts[again[2]], widths.get(again[2], 2)
            elif run := re.match(rf"{NAME}\.run\((.*), stream=", line):
                self._launched(run[1], sources[run[1]], _split(run[2]), counts, widths)
            elif re.search(r"extern_kernels\.|torch\.ops\.", line):
                operands = set(re.findall(r"\b\w+\b", line.partition("(")[2])) & counts.keys()
                self.library += sum(counts[n] * widths.get(n, 2) for n in operands)

    def _launched(
        self, name: str, source: str, given: list[str], counts: dict[str, int], widths: dict[str, int]
    ) -> None:
        kinds = re.search(r"'signature': \{(.*?)\}", source, re.S)
        pointers = re.findall(r"'(\w+)': '(\*?\w+)'", kinds[1] if kinds else "")
        body = source[source.index("@triton.jit") :].split("\n", 2)[2]
        loops = re.split(r"for r\d_offset in", body)
        most = prod(int(n) for n in given[sum(k.startswith("*") for _, k in pointers) :] if n.isdigit())
        total = 0
        for (pointer, kind), argument in zip(pointers, given, strict=False):
            if not kind.startswith("*"):
                continue
            buffer = re.findall(rf"(?:reinterpret_tensor\()?{NAME}", argument)[0].removeprefix("reinterpret_tensor")
            width = widths[buffer] = WIDTHS.get(kind[1:], 4)
            for what in ("load", "store|atomic_add"):
                places = [len(re.findall(rf"tl\.(?:{what})\({pointer} ", part)) for part in loops]
                size = min(counts.get(buffer, most), most * sum(places)) * width
                total += size * (sum(map(bool, places)) if size > L2_BYTES else 1)
        text = re.sub(r"\b(in_out|in|out)_ptr\d+\b", "p", body)
        self.moved[text] += total
        self.names[text] = name
        self.launches += 1


def _numel(shape: str) -> int:
    return prod(int(n) for n in re.findall(r"\d+", shape))


def _split(arguments: str) -> list[str]:
    """Arguments of a call, those in brackets whole."""
    return [a.strip() for a in re.findall(r"(?:[^,(]|\([^()]*(?:\([^()]*\)[^()]*)*\))+", arguments)]


def traffic(block: str, rows: int, settings: Settings | None) -> tuple[Traffic, int, int]:
    """(traffic, bytes kept plainly, bytes kept here) of a step of some blocks."""
    from tests.support import gpu_code

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    def make() -> tuple[nn.Module, torch.Tensor]:
        return BLOCKS[block](), torch.zeros(rows, 3, 224, 224).to(memory_format=torch.channels_last)

    found = Traffic()
    with record.collected() as records, norms_in_fp32():
        for code in gpu_code.sources(make, loss, None if settings is None else Partitioner(settings)):
            found.read(code)
    plain = sum(r.plain_bytes for r in records)
    return found, plain, sum(r.kept_bytes for r in records)


def compared(plain: Traffic, ours: Traffic, title: str, top: int) -> Table:
    """The kernels that differ, by the difference of their bytes."""
    table = Table("kernel", "plain MB", "ours MB", "more", title=title)
    texts = {t for t in {*plain.moved, *ours.moved} if plain.moved[t] != ours.moved[t]}
    for text in sorted(texts, key=lambda t: -abs(ours.moved[t] - plain.moved[t]))[:top]:
        name = ours.names.get(text) or plain.names[text]
        some, others = plain.moved[text] / 1e6, ours.moved[text] / 1e6
        table.add_row(f"{name[:60]}..{name[-24:]}" if len(name) > 86 else name, f"{some:,.0f}", f"{others:,.0f}",
                      f"{others - some:+,.0f}")  # fmt: skip
    return table


def main(argv: list[str] | None = None) -> int:
    """Prints the sums and the kernels of each network's blocks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", default=",".join(BLOCKS))
    parser.add_argument("--classes", default="bitwise,reassociated")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--top", type=int, default=12)
    words = parser.parse_args(argv)
    console = Console(width=150)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tests.support import gpu_code

        gpu_code.pretend_gpu(patch)
        patch.setattr(rounding, "rounds_within_kernels", lambda pair: True)
        patch.setattr(narrow, "converts_to_float8", lambda device: True)
        for block in words.blocks.split(","):
            plain, _, _ = traffic(block, words.batch, None)
            for name in words.classes.split(","):
                settings = Settings(fidelity=name) if name in FIDELITIES else Settings(lossy=name)
                ours, before, after = traffic(block, words.batch, settings)
                title = (
                    f"{block} {name}: kernels {plain.triton / 1e9:.2f} -> {ours.triton / 1e9:.2f} GB, "
                    f"{plain.ms:.2f} -> {ours.ms:.2f} ms, {plain.launches} -> {ours.launches}; libraries "
                    f"{plain.library / 1e9:.2f} -> {ours.library / 1e9:.2f} GB; kept {before / 2**20:,.0f} -> "
                    f"{after / 2**20:,.0f} MiB ({before / after:.2f}x less)"
                )
                console.print(compared(plain, ours, title, words.top))
                print(title, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
