"""cDMA's comparators: coders against ones that really write, ratios of patterns known by hand, layouts, networks."""

import json
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gistkit import cli
from gistkit.benchmark import LAYOUTS, ratio_rows, summed, watched
from gistkit.benchmark.ratios import LONGEST_RUN, deflate_bytes, rle_bytes, windows, zvc_bytes

RUNS = st.tuples(st.sampled_from([0, 1, -1, -(2**31)]), st.integers(1, 3) | st.integers(1, 300))
WORDS = st.lists(RUNS, min_size=1, max_size=12).map(lambda runs: [v for v, length in runs for _ in range(length)])


def run_length(words):
    """One window written out: a run's head (bit 7: of zeros; below it the length less one), then its non-zeros."""
    out, i = bytearray(), 0
    while i < len(words):
        zero, j = words[i] == 0, i
        while j < len(words) and j - i < LONGEST_RUN and (words[j] == 0) == zero:
            j += 1
        out.append((0x80 if zero else 0) | (j - i - 1))
        out += b"" if zero else words[i:j].tobytes()
        i = j
    return bytes(out)


def read_back(coded, dtype):
    out, i = [], 0
    while i < len(coded):
        length, zero = (coded[i] & 0x7F) + 1, coded[i] >> 7
        size = 0 if zero else length * np.dtype(dtype).itemsize
        out += [0] * length if zero else np.frombuffer(coded[i + 1 : i + 1 + size], dtype).tolist()
        i += 1 + size
    return out


@given(WORDS, st.integers(1, 9), st.sampled_from([np.int32, np.int16]))
def test_run_length_counts_what_a_coder_writes(values, rows, dtype):
    words = np.array(values * rows, dtype=np.int64).astype(dtype).reshape(rows, -1)
    coded = [run_length(window) for window in words]
    assert rle_bytes(words) == sum(map(len, coded))
    assert [read_back(c, dtype) for c in coded] == words.tolist()


@given(WORDS)
def test_zero_value_compression_counts_masks_and_non_zeros(values):
    words = np.array(values, dtype=np.int64).astype(np.int32)
    parts = [words[i : i + 32] for i in range(0, len(words), 32)]
    assert sum(zvc_bytes(p[None]) for p in parts) == sum(4 + 4 * sum(v != 0 for v in p) for p in parts)
    whole = words[: len(words) // 32 * 32]
    assert zvc_bytes(whole[None]) == len(whole) // 8 + 4 * np.count_nonzero(whole)


def test_known_patterns():
    zeros, ones = np.zeros((3, 1024), np.int32), np.ones((3, 1024), np.int32)
    assert (zvc_bytes(zeros), rle_bytes(zeros)) == (3 * 128, 3 * 8)  # ratios 32 and 512
    assert (zvc_bytes(ones), rle_bytes(ones)) == (3 * (128 + 4096), 3 * (8 + 4096))
    other = np.tile(np.array([0, 7], np.int32), (1, 512))
    assert (zvc_bytes(other), rle_bytes(other)) == (128 + 2048, 1024 + 2048)  # every run is one element long
    noise = np.random.default_rng(0).integers(-(2**31), 2**31, (2, 1024), dtype=np.int32)
    assert deflate_bytes(noise, 6) == 2 * (4096 + 5)  # a stored block: what cannot be compressed is only framed
    level1, level6 = (deflate_bytes(other, level) for level in (1, 6))
    assert level6 <= level1 < 4096 / 50
    assert level6 == len(zlib.compress(other.tobytes(), 6)) - 6  # zlib's header of 2 bytes and checksum of 4


def drawn(density, patch):
    """Positive fp32 of which ``density`` is not zero, patches of ``patch`` x ``patch`` zero or not as a whole."""
    kept = torch.rand(8, 64, 32 // patch, 32 // patch) < density
    kept = kept.repeat_interleave(patch, 2).repeat_interleave(patch, 3)
    return torch.where(kept, torch.randn(kept.shape).abs() + 1e-3, 0.0)


def test_ratios_follow_the_density():
    for density in (0.5, 0.1):
        x = drawn(density, 1)
        (row, *_) = rows = ratio_rows("drawn", "x", x, most=10_000)
        share = torch.count_nonzero(x).item() / x.numel()
        assert row["density"] == share == pytest.approx(density, abs=0.01)
        assert [r["zvc"] for r in rows] == pytest.approx([32 / (1 + 32 * share)] * 3, rel=1e-12)
        assert all(r["deflate1"] < r["deflate6"] < r["zvc"] and r["rle"] < r["zvc"] for r in rows)
    patches = {r["layout"]: r["rle"] for r in ratio_rows("drawn", "x", drawn(0.5, 4))}
    assert patches["NCHW"] > 1.15 * patches["NHWC"]  # zeros side by side along a row of pixels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_layouts_are_of_the_tensor_however_it_lies(dtype, memory_format):
    shape = (2, 3, 64, 32)
    x = torch.randn(shape).to(dtype).to(memory_format=memory_format)
    for layout, order in LAYOUTS.items():
        size = dict(zip("NCHW", shape, strict=True))
        indices = np.ndindex(*(size[name] for name in layout))
        at = [tuple(index[order.index(d)] for d in range(4)) for index in indices]
        want = torch.stack([x[i] for i in at])
        got = windows(x, layout, most=1000)
        assert got.shape == (x.nbytes // 4096, 4096 // x.itemsize)
        assert got.tobytes() == want.view(torch.uint8).numpy().tobytes()
        few = windows(x, layout, most=2)
        assert few.tolist() == [got[0].tolist(), got[-1].tolist()]
    assert windows(x[:, :, :3, :5], "NHWC", most=8).shape == (1, 90)


def test_zeros_of_a_channel_are_runs_in_nchw_alone():
    x = torch.ones(4, 8, 32, 32)
    x[:, ::2] = 0
    of = {r["layout"]: r["rle"] for r in ratio_rows("made", "x", x, most=1000)}
    # a window is a channel of an image: 8 heads of 128 each; in NHWC every run is one element
    assert of["NCHW"] == pytest.approx(8 / (4 + 8 * 8 / 4096)) and of["NHWC"] == pytest.approx(8 / (4 + 2))
    assert of["CHWN"] == of["NCHW"]


def test_a_sum_weighs_layers_by_their_bytes():
    rows = [*ratio_rows("s", "a", torch.zeros(1, 1, 32, 32)), *ratio_rows("s", "b", torch.ones(3, 1, 32, 32))]
    for row in summed(rows):
        assert row["zvc"] == pytest.approx(4 * 4096 / (128 + 3 * 4224)) and row["density"] == 0.75
        assert (row["layer"], row["nbytes"]) == ("all", 4 * 4096)


def test_outputs_are_seen_before_they_are_overwritten_and_call_by_call():
    relu = nn.ReLU()
    model = nn.Sequential(relu, nn.Conv2d(3, 3, 1), relu, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 4), nn.ReLU())
    seen = []
    x = torch.randn(2, 3, 4, 4)
    with watched(model, lambda name, y: seen.append((name, y.clone()))):
        model(x)
    assert [name for name, _ in seen] == ["0", "0", "3"] and torch.equal(seen[0][1], torch.relu(x))
    model(x)
    assert len(seen) == 3


def test_the_command_shows_networks(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    numbers = tmp_path / "ratios.json"
    command = ["bench", "--image-size", "32", "--device", "cpu", "--quick", "--json", str(numbers), "--ratios"]
    assert cli.main([*command, "alexnet"]) == 0
    assert "features.12" in capsys.readouterr().out
    rows = json.loads(numbers.read_text())["rows"]
    assert {r["layout"] for r in rows} == set(LAYOUTS) and rows[-1]["layer"] == "all"
    assert all(1 / 1.04 < r["zvc"] < 32 and 0 < r["density"] <= 1 for r in rows)
    assert cli.main([*command, "torch.nn:Identity"]) == 2
    assert "cannot be trained on 16 images of 32x32 (ValueError: " in capsys.readouterr().err
    assert cli.main([*command, "alexnett"]) == 2 and "did you mean 'alexnet'" in capsys.readouterr().err
