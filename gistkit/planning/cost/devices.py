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
Any other card is measured: by ``gistkit calibrate``, or at the first plan for a model on it.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from gistkit.errors import quoted
from gistkit.ir import from_json, to_json

GIB = 2**30
_DEVICES = ("cuda", "gpu", "mps", "xpu", "hip", "rocm", "auto")
CUDA_LIBRARIES_BYTES = 96 * 2**20
"""What cuBLAS and cuDNN hold for themselves under PyTorch: plans were measured 66 to 86 MiB above their prediction on
an H200, plain steps 85 MiB (docs/log.md, 2026-11-20)."""

Bytes = Annotated[int, Meta(ge=0, lt=2**50)]
Rate = Annotated[float, Meta(ge=0, le=2e5)]
Seconds = Annotated[float, Meta(ge=0, le=1)]


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
    ``source`` says where the figures are from; plans repeat it, and it makes no hardware another.

    Raises ValueError for rates that no device has: argument, demand, value, remedy. A file's figures are checked one by
    one (:meth:`from_json`).
    """

    name: Annotated[str, Meta(min_length=1)]
    memory_bytes: Bytes
    memory_gbps: Annotated[float, Meta(gt=0, le=1e6)]
    d2h_gbps: Rate
    h2d_gbps: Rate
    both_gbps: Rate
    flops: dict[str, Annotated[float, Meta(gt=0, le=1e18)]]
    launch_s: Seconds
    async_counts: bool
    codec_slowdown: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    libraries_bytes: Bytes = 0
    host_s: Seconds = 0.0
    runtime_host_s: Seconds = 0.0
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        rates = (self.d2h_gbps, self.h2d_gbps, self.both_gbps)
        if any(rates) and not all(rates):
            _refuse("d2h_gbps, h2d_gbps and both_gbps", "all above 0, or all 0 where there is no link", rates)
        if self.both_gbps > 1.05 * (self.d2h_gbps + self.h2d_gbps):
            _refuse("both_gbps", "at most the sum of both directions", self.both_gbps)
        if "float32" not in self.flops:
            _refuse("flops", "a mapping of dtype names to rates with 'float32' among them", self.flops)

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
        """The hardware of :meth:`to_json`'s text. Raises ValueError for any other: the place in it, what was expected
        there and what it has."""
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


CARDS = {"h200": r"H200", "titanx": r"(GeForce GTX )?TITAN X( \(Pascal\))?", "k40m": r"K40m"}
"""Presets of cards by the pattern of ``torch.cuda.get_device_name``, matched whole."""
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
    libraries_bytes=CUDA_LIBRARIES_BYTES, host_s=2.0e-5, runtime_host_s=1.07e-4,
    source="preset h200: measured on one",
)  # fmt: skip
_CPU = Hardware(
    "cpu", 64 * GIB, 10.0, d2h_gbps=0.0, h2d_gbps=0.0, both_gbps=0.0,
    flops={"float32": 5e10, "bfloat16": 5e10, "float16": 2e9}, launch_s=5e-6, async_counts=False, codec_slowdown=5.0,
    source="preset cpu: orders of magnitude of one core",
)  # fmt: skip
PRESETS = {h.name: h for h in (_TITANX, _K40M, _H200, _CPU)}


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
    return next((name for name, pattern in CARDS.items() if re.fullmatch(pattern, short, re.IGNORECASE)), None)
