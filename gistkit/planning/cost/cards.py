"""NVIDIA's cards as their datasheets give them: dense rates, memory bandwidth, link. Pure data.

Of these figures a training step reaches a share. The shares are those of the H200, the card that we measured
(:mod:`gistkit.planning.cost.devices`): 4.2 of 4.8 TB/s in a copy, 790 of 989 TFLOP/s in bf16 products, convolutions of
fp32 tensors at 200 of 494 TFLOP/s in TF32, and, assumed, 50 of 67 in fp32 and 55 of 63 GB/s over the link, 1.5 times as
much in both directions at once. The host's seconds are not in a datasheet: those of the H200's machine are taken.
A calibration (`gistkit calibrate`) takes the place of all of it.

Names are matched whole, so that a card's relatives (an A10G, a laptop's RTX 4090, a part of a card under MIG) do not
pass for it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MEMORY_SHARE, HALF_SHARE, TF32_SHARE, FP32_SHARE, LINK_SHARE, BOTH_WAYS = 0.875, 0.8, 0.4, 0.75, 0.87, 1.5
PCIE_GBPS = {3: 15.75, 4: 31.5, 5: 63.0}
"""16 lanes in one direction, by generation."""


class Card(NamedTuple):
    """A card by its preset's name and by the pattern of ``torch.cuda.get_device_name``.

    ``memory_gb`` and ``memory_gbps`` in 1e9; ``fp32``, ``tf32`` and ``half`` (fp16 and bf16, accumulated in fp32) in
    1e12 dense operations per second. ``tf32`` 0: a card from before Ampere, which has neither TF32 nor bf16.
    """

    preset: str
    device: str
    memory_gb: int
    memory_gbps: float
    fp32: float
    tf32: float
    half: float
    pcie: int
    datasheet: str

    @property
    def source(self) -> str:
        """Where the figures are from."""
        return f"NVIDIA {self.datasheet} datasheet, at the shares of it that an H200 reaches"


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


def preset_name(device_name: str) -> str | None:
    """The preset of a CUDA device by its name; None for a card without one."""
    short = re.sub(r"^(NVIDIA |Tesla )+", "", device_name.strip())
    patterns = {**MEASURED, **{card.preset: card.device for card in CARDS}}
    return next((name for name, pattern in patterns.items() if re.fullmatch(pattern, short, re.IGNORECASE)), None)
