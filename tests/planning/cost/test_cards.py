"""Presets by datasheet: which device names they are for, and how their rates follow from the published ones."""

import pytest

from gistkit.planning.cost.devices import CARDS, PRESETS, preset_name

NAMES = {
    "NVIDIA A100-PCIE-40GB": "a100-40gb-pcie", "NVIDIA A100-SXM4-40GB": "a100-40gb-sxm",
    "NVIDIA A100 80GB PCIe": "a100-80gb-pcie", "NVIDIA A100-SXM4-80GB": "a100-80gb-sxm",
    "NVIDIA A10": "a10", "NVIDIA A30": "a30", "NVIDIA L4": "l4", "NVIDIA L40": "l40", "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 3090": "rtx3090", "NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA GeForce RTX 5090": "rtx5090",
    "NVIDIA RTX 6000 Ada Generation": "rtx6000ada", "Tesla V100-PCIE-16GB": "v100-pcie",
    "Tesla V100-SXM2-32GB": "v100-sxm2", "Tesla T4": "t4", "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 80GB HBM3": "h100-sxm", "NVIDIA H200": "h200", "NVIDIA B200": "b200",
}  # fmt: skip
RELATIVES = [
    "NVIDIA A10G", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "NVIDIA GB200", "Quadro RTX 6000", "",
]  # fmt: skip


def test_every_card_is_known_by_the_name_that_cuda_gives_it():
    assert {name: preset_name(name) for name in NAMES} == NAMES
    assert {card.preset for card in CARDS} == set(NAMES.values()) - {"h200"}
    assert {name: preset_name(name) for name in RELATIVES} == dict.fromkeys(RELATIVES), "a relative is not the card"


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.preset)
def test_sustained_rates_lie_below_the_published_ones(card):
    preset = PRESETS[card.preset]
    assert 0.8 * card.memory_gbps < preset.memory_gbps < card.memory_gbps
    assert 0.7e12 * card.fp32 < preset.flops["float32"] < 1e12 * card.fp32
    assert 0.7e12 * card.half < preset.flops["float16"] < 1e12 * card.half
    assert ("tf32" in preset.flops) == (preset.flops["bfloat16"] == preset.flops["float16"]) == (card.tf32 > 0)
    assert preset.d2h_gbps == preset.h2d_gbps < preset.both_gbps < 2 * preset.d2h_gbps
    assert preset.source.startswith(f"preset {card.preset}: NVIDIA ") and "datasheet" in preset.source
