"""Kept calibrations: where they lie, when a card is measured anew, which card a plan on a GPU takes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gistkit import cli
from gistkit.planning.cost.devices import PRESETS, Hardware
from gistkit.profiling import calibration as module
from gistkit.profiling.calibration import calibration_file, card_at_hand, keep_calibration, kept_calibration

CARD = "NVIDIA H800 / 80GB"
DEVICE = torch.device("cuda", 0)
FOUND = replace(PRESETS["h200"], name=CARD, memory_bytes=10**10, source="calibrated 2026-11-22, torch 2.13.0")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GISTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def cuda(monkeypatch):
    """A card of this name, whose memory is not that of the calibration."""
    found = SimpleNamespace(name=CARD, total_memory=9 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    return found


@pytest.fixture
def calls(monkeypatch):
    """The calls of a calibration by no clock."""
    seen = []
    monkeypatch.setattr(module, "calibrate", lambda device: (seen.append(device), FOUND)[1])
    return seen


def test_what_is_kept_comes_back_whole():
    assert kept_calibration(CARD) is None
    path = keep_calibration(FOUND)
    assert path == calibration_file(CARD) and [f.name for f in path.parent.iterdir()] == [path.name]
    found = kept_calibration(CARD)
    assert found == FOUND and found.source == FOUND.source
    assert kept_calibration("NVIDIA H800  80GB") is None, "another card of which the file name is the same"


@pytest.mark.parametrize("text", ["{", '{"name": "x"}', "", FOUND.to_json().replace(CARD, "another")])
def test_a_damaged_file_is_measured_anew(cuda, calls, text):
    path = calibration_file(CARD)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert card_at_hand(DEVICE) == FOUND and len(calls) == 1
    assert Hardware.from_json(path.read_text()) == FOUND


def test_a_folder_that_cannot_be_written_is_no_error(cuda, cache, calls):
    cache.write_text("a file where the folder should be")
    assert [card_at_hand(DEVICE) for _ in range(2)] == [FOUND, FOUND]
    assert len(calls) == 2 and keep_calibration(FOUND) is None


def test_a_plan_takes_the_calibration_the_preset_or_a_measurement(calls, cuda):
    assert card_at_hand(DEVICE) == FOUND and calls == [DEVICE]
    cuda.name = "NVIDIA L40S"
    assert card_at_hand(DEVICE) == replace(PRESETS["l40s"], memory_bytes=cuda.total_memory)
    keep_calibration(replace(FOUND, name=cuda.name))
    found = card_at_hand(DEVICE)
    assert (found.name, found.memory_gbps, found.memory_bytes) == (cuda.name, FOUND.memory_gbps, cuda.total_memory)
    assert calls == [DEVICE]


def test_a_calibration_leaves_random_states_and_ignores_autocast(monkeypatch):
    seen = []

    def measured(place):
        torch.rand(3)
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return FOUND

    monkeypatch.setattr("gistkit.profiling.calibration._measured", measured)
    before = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert module.calibrate("cpu") is FOUND
    assert torch.equal(torch.get_rng_state(), before) and seen == [(False, True)]


def test_the_command_keeps_a_gpus_figures(monkeypatch, capsys):
    monkeypatch.setattr("gistkit.commands.calibrate.calibrate", lambda device: FOUND)
    assert cli.main(["calibrate"]) == 0
    assert "kept in " in capsys.readouterr().out and kept_calibration(CARD) == FOUND
