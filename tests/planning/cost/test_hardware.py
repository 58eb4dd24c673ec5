"""Hardware: presets, JSON both ways, and the text of every refusal."""

import json
from dataclasses import replace

import pytest

from gistkit.planning.cost.devices import CARDS, PRESETS, Hardware, hardware, preset_name

PRESET_NAMES = ", ".join(PRESETS)


def test_presets():
    titanx, k40m, h200 = PRESETS["titanx"], PRESETS["k40m"], PRESETS["h200"]
    # Sustained figures lie below the published ones: 7 TFLOP/s, 336 GB/s; 4.29 TFLOP/s, 288 GB/s; 12.8 of 16 GB/s.
    assert 3.5e12 < titanx.flops["float32"] < 7e12 and 168 < titanx.memory_gbps < 336
    assert 2.1e12 < k40m.flops["float32"] < 4.29e12 and 144 < k40m.memory_gbps < 288
    assert 4150 <= h200.memory_gbps <= 4300 and h200.both_gbps < h200.d2h_gbps + h200.h2d_gbps
    assert all(name == preset.name for name, preset in PRESETS.items())
    assert [name for name, preset in PRESETS.items() if not preset.has_link] == ["cpu"]
    assert [name for name, preset in PRESETS.items() if not preset.async_counts] == ["cpu"]
    # The papers' cards have no host of ours, and a CPU is its own.
    assert [name for name, preset in PRESETS.items() if not preset.runtime_host_s] == ["titanx", "k40m", "cpu"]


@pytest.mark.parametrize("name", PRESETS)
def test_json_both_ways(name):
    assert Hardware.from_json(PRESETS[name].to_json()) == PRESETS[name]


def test_a_file_from_before_a_figure_was_measured_loads():
    older = json.loads(PRESETS["h200"].to_json())
    del older["link_interference"]
    assert Hardware.from_json(json.dumps(older)) == PRESETS["h200"] and PRESETS["h200"].link_interference == 0


def test_what_hardware_takes(tmp_path):
    mine = replace(PRESETS["k40m"], name="mine")
    path = tmp_path / "mine.json"
    path.write_text(mine.to_json())
    assert hardware("titanx") is PRESETS["titanx"]
    assert hardware(mine) is mine
    assert hardware(path) == hardware(str(path)) == mine
    assert hardware(None) is hardware() is PRESETS["cpu"]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("titan-x", "did you mean 'titanx'?"), ("/nowhere/card.json", "measure one with `gistkit calibrate --out FILE`")],
)
def test_an_unknown_name_says_which_there_are(name, remedy):
    with pytest.raises(ValueError) as raised:
        hardware(name)
    named = f"hardware must be one of {PRESET_NAMES} or the path of a calibrated file, got {name!r}; {remedy}"
    assert str(raised.value) == named


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{not json", r"^hardware file .*bad.json: expected JSON, got other text \(.*\); write it anew with `gistkit"),
        (b'{"name": "x"}', r"bad.json: object missing required field `memory_bytes`; write it anew with `gistkit cal"),
        (b"\xff\xfe\x00", r"bad.json cannot be read \(.*\); `gistkit calibrate` writes one$"),
    ],
)
def test_a_corrupt_file(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=message):
        hardware(path)


@pytest.mark.parametrize(
    ("field", "value", "demand"),
    [
        ("name", "", "a text that is not empty"),
        ("memory_bytes", 0, r"a whole number of bytes above 0 and below 2\*\*50"),
        ("memory_gbps", float("nan"), "a number above 0"),
        ("d2h_gbps", 0.0, "all above 0, or all 0 where there is no link"),
        ("both_gbps", 60.0, "at most the sum of both directions"),
        ("launch_s", 8, "a number of at least 0 and at most 1"),
        ("flops", {"bfloat16": 1e12}, "a mapping of dtype names to rates with 'float32' among them"),
    ],
)
def test_absurd_values(field, value, demand):
    # A launch of 8 s, a bandwidth in bytes instead of GB: units mistaken by whoever wrote the file.
    with pytest.raises(ValueError, match=rf"^hardware: .*{field.split('_')[0]}.* must be {demand}.*, got ") as raised:
        replace(PRESETS["titanx"], **{field: value})
    assert str(raised.value).endswith(f"take a preset ({PRESET_NAMES}) or run `gistkit calibrate`")


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
