"""Hardware: what a device can do, as numbers, and presets. Pure data.

A preset's rates are *sustained* figures: what a copy or a large product really reaches, so that seconds are bytes or
operations divided by a rate. A file written by ``gistkit calibrate`` takes a preset's place anywhere.

titanx: Maxwell, 7 TFLOP/s, 336 GB/s, 12 GB, PCIe gen3 of 16 GB/s (vDNN section IV-B; Gist's card too). Sustained: DMA
12.8 GB/s (vDNN section II-C); 64 % and 75 % of arithmetic and memory, assumed: convolutions as products, and copies.
k40m: Kepler, 4.29 TFLOP/s, 288 GB/s, 12 GB, PCIe gen3 (moDNN section V names the card). Sustained: 70 % and, with ECC,
65 %, assumed; DMA as above.
h200: 140 GiB, PCIe gen5. Measured: the copy, bf16 products (790 TFLOP/s). TF32 convolutions are fitted: with 200
TFLOP/s the plain fp32 step at batch 64 comes out at 48.4 ms for VGG-16 and 27.3 ms for ResNet-50, where 48.2 and
32.3 ms were measured (SGD included on both sides). The link and fp32 products are published or assumed figures. The
host: 4 and 5 ms for the 228 and 230 tasks of ResNet-50's forward and backward, 28 and 21 ms under gistkit (docs/log.md,
"bound by the host"), on one host of several that differed by up to 1.7.
cpu: one core of a server, orders of magnitude. A copy into memory in use goes at twice the 10 GB/s; a fresh tensor's
pages cost as much again and more.
The other cards: their datasheets' figures at the shares of them that an H200 reaches: 4.2 of 4.8 TB/s in a copy, 790 of
989 TFLOP/s in bf16 products, convolutions of fp32 tensors at 200 of 494 TFLOP/s in TF32, and, assumed, 50 of 67 in fp32
and 55 of 63 GB/s over the link, 1.5 times as much in both directions at once; the host is the H200's.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from gistkit.errors import quoted
from gistkit.ir import from_json, to_json

MEMORY_SHARE, HALF_SHARE, TF32_SHARE, FP32_SHARE, LINK_SHARE, BOTH_WAYS = 0.875, 0.8, 0.4, 0.75, 0.87, 1.5
PCIE_GBPS = {3: 15.75, 4: 31.5, 5: 63.0}
"""16 lanes in one direction, by generation."""
GIB = 2**30
_LIMITS = {"memory_gbps": 1e6, "codec_slowdown": 1e6, "d2h_gbps": 1e5, "h2d_gbps": 1e5, "both_gbps": 2e5}
_LIMITS |= dict.fromkeys(("launch_s", "host_s", "runtime_host_s"), 1.0)
_LIMITS |= {"link_interference": 10.0, "move_host_factor": 1e3, "form_host_factor": 1e3}
_MOST_FLOPS = 1e18
_DEVICES = ("cuda", "gpu", "mps", "xpu", "hip", "rocm", "auto")
H200_HOST_S, H200_RUNTIME_HOST_S = 2.0e-5, 1.07e-4
CUDA_LIBRARIES_BYTES = 96 * 2**20
"""What cuBLAS and cuDNN hold for themselves under PyTorch: plans were measured 66 to 86 MiB above their prediction on
an H200, plain steps 85 MiB (docs/log.md, 2026-11-20)."""


@dataclass(frozen=True)
class Hardware:
    """One device with its link to the host.

    ``memory_bytes`` is the capacity. ``memory_gbps`` is the bandwidth of a device copy in GB/s (1e9), bytes read and
    written both counted. ``d2h_gbps`` and ``h2d_gbps`` are the link's in each direction alone, ``both_gbps`` the sum of
    both while both are busy; all three 0: there is no link. ``flops`` are sustained operations per second by dtype name
    (a multiplication and an addition are two); ``tf32``, where given, is what convolutions of fp32 tensors run at,
    PyTorch's default. ``launch_s`` is the least time of one kernel. ``async_counts``: the sizes of sparse encodings
    reach the host late, so scratches live on for a while (CUDA). ``codec_slowdown`` multiplies the codecs' times, which
    are those of the Triton kernels. ``libraries_bytes`` is what the device's libraries hold for
    themselves as long as the process lives (cuBLAS's workspaces): it counts in every peak and so in every budget.
    ``host_s`` is how long the host is busy with one task of a step (an op's forward, a node's backward) under plain
    PyTorch, ``runtime_host_s`` the same where gistkit carries out a plan; 0: not known, or host and device are one.
    A task that a plan runs anew, and a transfer, take the host ``move_host_factor`` tasks; a storage in another form
    takes it ``form_host_factor``, beside the task that saves it.
    ``link_interference`` is the share by which a task that moving bytes bounds takes longer while a transfer runs
    beside it, in either direction or both; 0: not known, or nothing.
    ``source`` says where the figures are from; plans repeat it, and it makes no hardware another.

    Raises ValueError for what no device can be: argument, demand, value, remedy.
    """

    name: str
    memory_bytes: int
    memory_gbps: float
    d2h_gbps: float
    h2d_gbps: float
    both_gbps: float
    flops: dict[str, float]
    launch_s: float
    async_counts: bool
    codec_slowdown: float = 1.0
    libraries_bytes: int = 0
    host_s: float = 0.0
    runtime_host_s: float = 0.0
    move_host_factor: float = 1.0
    form_host_factor: float = 0.0
    link_interference: float = 0.0
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.name:
            _refuse("name", "a text that is not empty", self.name)
        if type(self.memory_bytes) is not int or not 0 < self.memory_bytes < 2**50:
            _refuse("memory_bytes", "a whole number of bytes above 0 and below 2**50", self.memory_bytes)
        if type(self.libraries_bytes) is not int or not 0 <= self.libraries_bytes < self.memory_bytes:
            _refuse("libraries_bytes", "a whole number of bytes below memory_bytes", self.libraries_bytes)
        for figure, limit in _LIMITS.items():
            _check_number(figure, getattr(self, figure), figure in ("memory_gbps", "codec_slowdown"), limit)
        rates = (self.d2h_gbps, self.h2d_gbps, self.both_gbps)
        if any(rates) and not all(rates):
            _refuse("d2h_gbps, h2d_gbps and both_gbps", "all above 0, or all 0 where there is no link", rates)
        if self.both_gbps > 1.05 * (self.d2h_gbps + self.h2d_gbps):
            _refuse("both_gbps", "at most the sum of both directions", self.both_gbps)
        if "float32" not in self.flops:
            _refuse("flops", "a mapping of dtype names to rates with 'float32' among them", self.flops)
        for dtype, rate in self.flops.items():
            _check_number(f"flops[{dtype!r}]", rate, True, _MOST_FLOPS)

    @property
    def has_link(self) -> bool:
        return self.both_gbps > 0

    @property
    def shared_rate(self) -> float:
        """The rate of either direction of the link while both are busy, as a share of its own."""
        return min(1.0, self.both_gbps / (self.d2h_gbps + self.h2d_gbps)) if self.has_link else 1.0

    def to_json(self) -> str:
        """The hardware as JSON text."""
        return to_json(self, indent=2)

    @staticmethod
    def from_json(text: str) -> Hardware:
        """The hardware of :meth:`to_json`'s text. Raises ValueError, with the place, for any other."""
        try:
            return from_json(Hardware, text)[0]
        except ValueError as error:
            again = "" if "gistkit calibrate" in str(error) else "; write it anew with `gistkit calibrate`"
            raise ValueError(f"hardware: {str(error).removeprefix('hardware: ')}{again}") from error


def _hint(name: str) -> str:
    measure = "measure one with `gistkit calibrate --out FILE`"
    if Path(name).name != name or Path(name).suffix:
        return measure
    if name.partition(":")[0] in _DEVICES:
        return "leave it out for the device at hand"
    near = difflib.get_close_matches(name.replace(" ", ""), PRESETS, n=1, cutoff=0.8)  # no other card of a family
    return f"did you mean {near[0]!r}?" if near else f"leave it out for the device at hand, or {measure}"


def _refuse(field: str, demand: str, value: object) -> None:
    raise ValueError(
        f"hardware: {field} must be {demand}, got {value!r}; take a preset ({', '.join(PRESETS)}) or run "
        "`gistkit calibrate`"
    )


def _check_number(field: str, value: object, positive: bool, limit: float) -> None:
    wrong = isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= limit
    if wrong or (positive and value == 0):
        _refuse(field, f"a number {'above 0' if positive else 'of at least 0'} and at most {limit:g}", value)


class Card(NamedTuple):
    """A card by its preset's name and by the pattern of ``torch.cuda.get_device_name``, matched whole. ``memory_gb``
    and ``memory_gbps`` in 1e9; ``fp32``, ``tf32`` and ``half`` (fp16 and bf16, accumulated in fp32) in 1e12 dense
    operations per second. ``tf32`` 0: a card from before Ampere, which has neither TF32 nor bf16."""

    preset: str
    device: str
    memory_gb: int
    memory_gbps: float
    fp32: float
    tf32: float
    half: float
    pcie: int
    datasheet: str


CARDS = (
    Card("a100-40gb-pcie", r"A100-PCIE-40GB", 40, 1555, 19.5, 156, 312, 4, "A100"),
    Card("a100-40gb-sxm", r"A100-SXM4-40GB", 40, 1555, 19.5, 156, 312, 4, "A100"),
    Card("a100-80gb-pcie", r"A100 80GB PCIe|A100-PCIE-80GB", 80, 1935, 19.5, 156, 312, 4, "A100"),
    Card("a100-80gb-sxm", r"A100-SXM4-80GB", 80, 2039, 19.5, 156, 312, 4, "A100"),
    Card("a10", r"A10", 24, 600, 31.2, 62.5, 125, 4, "A10"),
    Card("a30", r"A30", 24, 933, 10.3, 82, 165, 4, "A30"),
    Card("l4", r"L4", 24, 300, 30.3, 60, 121, 4, "L4"),
    Card("l40", r"L40", 48, 864, 90.5, 90.5, 181, 4, "L40"),
    Card("l40s", r"L40S", 48, 864, 91.6, 183, 362, 4, "L40S"),
    Card("rtx3090", r"GeForce RTX 3090", 24, 936, 35.6, 35.6, 71, 4, "GA102 (RTX 3090)"),
    Card("rtx4090", r"GeForce RTX 4090", 24, 1008, 82.6, 82.6, 165.2, 4, "Ada (RTX 4090)"),
    Card("rtx5090", r"GeForce RTX 5090", 32, 1792, 104.8, 104.8, 209.5, 5, "Blackwell (RTX 5090)"),
    Card("rtx6000ada", r"RTX 6000 Ada Generation", 48, 960, 91.1, 182.1, 364.2, 4, "RTX 6000 Ada Generation"),
    Card("v100-pcie", r"V100-PCIE-(16|32)GB", 16, 900, 14, 0, 112, 3, "V100"),
    Card("v100-sxm2", r"V100-SXM2-(16|32)GB(-LS)?", 16, 900, 15.7, 0, 125, 3, "V100"),
    Card("t4", r"T4", 16, 320, 8.1, 0, 65, 3, "T4"),
    Card("h100-pcie", r"H100 PCIe", 80, 2000, 51, 378, 756, 5, "H100"),
    Card("h100-sxm", r"H100 80GB HBM3", 80, 3350, 67, 494, 989, 5, "H100"),
    Card("b200", r"B200", 180, 8000, 75, 1100, 2250, 5, "HGX B200"),
)
MEASURED = {"h200": r"H200", "titanx": r"(GeForce GTX )?TITAN X( \(Pascal\))?", "k40m": r"K40m"}
"""Presets whose figures are measured ones or the papers', by the same patterns."""


def _of_datasheet(card: Card) -> Hardware:
    half, link_gbps = 1e12 * HALF_SHARE * card.half, LINK_SHARE * PCIE_GBPS[card.pcie]
    fp32 = 1e12 * FP32_SHARE * card.fp32
    modern = {"tf32": 1e12 * TF32_SHARE * card.tf32} if card.tf32 else {}
    return Hardware(
        name=card.preset,
        memory_bytes=card.memory_gb * 10**9,
        memory_gbps=MEMORY_SHARE * card.memory_gbps,
        d2h_gbps=link_gbps,
        h2d_gbps=link_gbps,
        both_gbps=BOTH_WAYS * link_gbps,
        flops={"float32": fp32, "float16": half, "bfloat16": half if card.tf32 else fp32, **modern},
        launch_s=8e-6,
        async_counts=True,
        libraries_bytes=CUDA_LIBRARIES_BYTES,
        host_s=H200_HOST_S,
        runtime_host_s=H200_RUNTIME_HOST_S,
        source=f"preset {card.preset}: NVIDIA {card.datasheet} datasheet, at the shares of it that an H200 reaches",
    )


_TITANX = Hardware(
    "titanx", 12 * GIB, 252.0, d2h_gbps=12.8, h2d_gbps=12.8, both_gbps=25.6,
    flops={"float32": 4.5e12, "float16": 4.5e12, "bfloat16": 4.5e12}, launch_s=8e-6, async_counts=True,
    source="preset titanx: published figures, of them assumed shares",
)  # fmt: skip
_K40M = replace(
    _TITANX, name="k40m", memory_gbps=187.0, flops={"float32": 3.0e12, "float16": 3.0e12, "bfloat16": 3.0e12},
    source="preset k40m: published figures, of them assumed shares",
)  # fmt: skip
_H200 = Hardware(
    "h200", 150_754_820_096,  # 140.4 GiB, as the driver reports it
    4200.0, d2h_gbps=55.0, h2d_gbps=55.0, both_gbps=83.0,  # "both directions at once can halve one"
    flops={"float32": 5.0e13, "tf32": 2.0e14, "bfloat16": 7.9e14, "float16": 7.9e14}, launch_s=8e-6, async_counts=True,
    libraries_bytes=CUDA_LIBRARIES_BYTES, host_s=H200_HOST_S, runtime_host_s=H200_RUNTIME_HOST_S,
    source="preset h200: measured on one",
)  # fmt: skip
_CPU = Hardware(
    "cpu", 64 * GIB, 10.0, d2h_gbps=0.0, h2d_gbps=0.0, both_gbps=0.0,
    flops={"float32": 5e10, "bfloat16": 5e10, "float16": 2e9}, launch_s=5e-6, async_counts=False, codec_slowdown=5.0,
    source="preset cpu: orders of magnitude of one core",
)  # fmt: skip
PRESETS = {h.name: h for h in (_TITANX, _K40M, _H200, _CPU, *map(_of_datasheet, CARDS))}


def hardware(which: Hardware | str | Path | None = None) -> Hardware:
    """A :class:`Hardware` as it is, a preset by name, or the one in a file that ``gistkit calibrate`` wrote.

    None is the ``cpu`` preset. Raises TypeError for anything else; ValueError for a name that is neither a preset nor a
    file, and for a file that cannot be read or holds no hardware.
    """
    if which is None:
        return PRESETS["cpu"]
    if isinstance(which, Hardware):
        return which
    if not isinstance(which, str | Path):
        raise TypeError(
            f"hardware must be a preset's name ({', '.join(PRESETS)}), the path of a file or a Hardware, "
            f"got {type(which).__name__}; pass one of these"
        )
    if str(which) in PRESETS:
        return PRESETS[str(which)]
    path = Path(which)
    if not path.is_file():
        raise ValueError(
            f"hardware must be one of {', '.join(PRESETS)} or the path of a calibrated file, got {quoted(str(which))}; "
            f"{_hint(str(which).lower())}"
        )
    try:
        found = Hardware.from_json(path.read_text(encoding="utf-8"))
        return replace(found, source=f"file {path}" + (f", {found.source}" if found.source else ""))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"hardware file {path} cannot be read ({error}); `gistkit calibrate` writes one") from error
    except ValueError as error:
        raise ValueError(f"hardware file {path}: {str(error).removeprefix('hardware: ')}") from error


def preset_name(device_name: str) -> str | None:
    """The preset of a CUDA device by its name; None for a card without one."""
    short = re.sub(r"^(NVIDIA |Tesla )+", "", device_name.strip())
    patterns = {**MEASURED, **{card.preset: card.device for card in CARDS}}
    return next((name for name, pattern in patterns.items() if re.fullmatch(pattern, short, re.IGNORECASE)), None)
