"""gistkit.plan: which device a plan is for, and what is known of it."""

from dataclasses import replace

import pytest
import torch

import gistkit
from gistkit.planning.cost.devices import PRESETS
from gistkit.profiling.calibration import card
from tests.support.planning_cases import GIB, H200, made, net


def test_the_preset_and_the_card_hold_the_same():
    x = torch.randn(2, 3, 32, 32)
    by_name, free = (gistkit.plan(net(), x, policy="plain", hardware=h, reserved_bytes=55) for h in ("h200", H200))
    assert by_name.peak_bytes - free.peak_bytes == 96 * 2**20
    by_card = gistkit.plan(net(), x, policy="plain", hardware=card("NVIDIA H200", GIB))
    assert by_card.peak_bytes + 55 == by_name.peak_bytes
    assert by_name.contract.reserved_bytes == free.contract.reserved_bytes == 55
    assert [name for name, preset in PRESETS.items() if not preset.libraries_bytes] == ["titanx", "k40m", "cpu"]


def test_hardware_without_a_link():
    text = r"policy=\"vdnn-all\" moves tensors to the host, and hardware 'cpu' has no"
    with pytest.raises(gistkit.PlanError, match=text):
        made(hardware="cpu", policy="vdnn-all")
    assert made(hardware="cpu", budget="80%").peak_bytes < made(hardware="cpu", policy="plain").peak_bytes


def test_cards():
    assert card("NVIDIA H200", 100 * GIB).name == "h200" and card("NVIDIA H200", 100 * GIB).memory_bytes == 100 * GIB
    assert card("NVIDIA TITAN X (Pascal)", GIB).name == card("GeForce GTX TITAN X", GIB).name == "titanx"
    assert card("Tesla K40m", GIB).name == "k40m"
    assert card("NVIDIA H200", 100 * GIB).libraries_bytes == 96 * 2**20
    assert card("NVIDIA A100-SXM4-80GB", 80 * GIB) == replace(PRESETS["a100-80gb-sxm"], memory_bytes=80 * GIB)
    assert card("NVIDIA H800", 80 * GIB) is None, "no card is planned at another's rates"


def test_a_plan_says_where_its_rates_are_from(tmp_path):
    assert made(hardware=None).prediction.rates == "preset cpu: orders of magnitude of one core"
    assert made(hardware="rtx4090").prediction.rates.startswith("preset rtx4090: NVIDIA Ada (RTX 4090) datasheet")
    own = replace(PRESETS["h200"], name="mine", source="")
    assert made(hardware=own).prediction.rates == "given as mine"
    file = tmp_path / "mine.json"
    file.write_text(replace(own, source="calibrated 2026-11-22, torch 2.13").to_json())
    found = made(hardware=file)
    assert found.hardware == "mine" and found.prediction.rates == f"file {file}, calibrated 2026-11-22, torch 2.13"
    assert gistkit.Plan.from_json(found.to_json()) == found
