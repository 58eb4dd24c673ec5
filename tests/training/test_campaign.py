"""The driver of many trainings: time limits, resumption, one file of rows; and the page that is made of them."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import accuracy, accuracy_page
from bench.accuracy import Entry

HERE = "tests.training.test_accuracy"
ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, time
from pathlib import Path
from bench import accuracy
from bench.accuracy import Entry
model, out = sys.argv[1:]
class Clock:
    time, sleep = time.time, time.sleep
    def monotonic():  # the time is over once what never ends has a row
        return time.monotonic() + 10**6 * (Path(out).exists() and model in Path(out).read_text())
accuracy.time, accuracy.WRITE_S = Clock, 0.1
accuracy.CAMPAIGN = (
    Entry("tests.training.test_accuracy:normed", "fp32 fp8", range(1), 2, 256, 0.05, density=5),
    Entry(model, "fp32", range(1), 10**6, 256, 0.05),
)
sys.exit(accuracy.main(["--out", out, "--device", "cpu", "--jobs", "1"]))
"""


def run(last, out):
    """The lines that the driver prints, and the status it exits with."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, last, str(out)]
    done = subprocess.run(command, env=environment, timeout=500, capture_output=True, text=True)
    return done.stdout, done.returncode


def rows_in(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_campaign_within_a_time_limit(tmp_path):
    out = tmp_path / "new" / "rows.jsonl"
    told, status = run(f"{HERE}:linear", out)
    assert status == 0 and told.count("done ") == 2 and told.count("stopped") == 1
    rows = rows_in(out)
    epochs = [r for r in rows if r["kind"] == "epoch"]
    assert all(r["tf32"] and r["data"] == "digits" and r["device"] == "cpu" for r in epochs)
    whole = [r for r in epochs if r["finished"]]
    assert {(r["model"], r["scheme"], r["epoch"]) for r in whole} == {
        (f"{HERE}:normed", name, epoch) for name in ("fp32", "fp8") for epoch in (0, 1)
    }
    # what never ends is killed, and its epochs are kept as unfinished
    assert len(whole) == 4 and {r["model"] for r in epochs if not r["finished"]} == {f"{HERE}:linear"}
    measured = {(r["model"], r["scheme"], r["seed"], r["step"]) for r in rows if r["kind"] == "density"}
    assert measured == {(f"{HERE}:normed", "fp32", 0, 0), (f"{HERE}:normed", "fp32", 0, 5)}
    # what is done is not run again; unfinished rows make room for a training that begins anew; what fails is told
    told, status = run(f"{HERE}:random_images", out)
    assert status == 1 and "2 trainings are done, 1 to do" in told and "failed" in told
    assert rows_in(out) == [r for r in rows if r["finished"]]


class Process:
    """One that runs until it is killed."""

    exitcode = None

    def is_alive(self):
        return self.exitcode is None

    def kill(self):
        self.exitcode = -9

    def join(self):
        pass


def test_the_last_makes_room_where_the_first_is_late(tmp_path, monkeypatch, capsys):
    """Ten epochs of 100 s, two are done: 800 s are left, of which 500 are to be had."""
    of = argparse.Namespace(only="", epochs=0, data="digits")
    todo = accuracy.trainings([Entry("alexnet", "fp32 fp8 int4s fp32", range(1), 10, 128, 0.1)], of)
    assert [t.key for t in todo] == [("alexnet", name, 0) for name in ("fp32", "fp8", "int4s")]
    campaign = accuracy.Campaign([todo[2]], [], tmp_path / "out.jsonl", time.monotonic() + 500)
    for t in todo[:2]:
        t.folder, t.process = tmp_path / t.key[1], Process()
        t.folder.mkdir()
        (t.folder / "rows.jsonl").write_text('{"seconds": 100.0, "accuracy": 0.5}\n' * 2 + '{"seco')
        campaign._begun.append(t)
        campaign._running.append(t)
    campaign._look()  # too early to judge
    assert all(t.process.is_alive() for t in todo[:2])
    monkeypatch.setattr(accuracy, "STOP_S", 0.0)
    for _ in range(2):  # the first goes on alone, late as it is
        campaign._look()
        assert [t.process.is_alive() for t in todo[:2]] == [True, False]
    assert "stopped  ('alexnet', 'fp8', 0)  2 epochs  50.00 %" in capsys.readouterr().out
    assert campaign._next() is None  # nor would another ten epochs fit
    campaign._until += 600
    assert campaign._next() is todo[2]


def training(model, scheme, *ends, seeds=None, finished=True, bits=32.0):
    """Rows of two epochs, a seed an accuracy."""
    about = {"kind": "epoch", "model": model, "data": "cifar10", "epochs": 2, "batch": 256, "lr": 0.1, "momentum": 0.9}
    about |= {"weight_decay": 5e-4, "tf32": True, "environment": {"device": "card", "torch": "2"}, "finished": finished}
    about |= {"scheme": scheme, "bits": bits, "kept_bytes": int(bits * 2**20)}
    curves = zip(seeds or range(len(ends)), ends, strict=True)
    return [{**about, "seed": s, "epoch": e, "accuracy": end - 0.1 * (1 - e)} for s, end in curves for e in (0, 1)]


def test_the_page_follows_from_the_rows(tmp_path, monkeypatch):
    inception = "bench.networks:inception"
    rows = [
        *training("alexnet", "fp32", 0.770, 0.771, 0.772),
        *training("alexnet", "fp8", 0.771, 0.770, 0.772, bits=8.5),
        *training("alexnet", "immediate:fp8", 0.5, 0.501, 0.502),
        *training("alexnet", "int4s", 0.760, seeds=[1], bits=4.5),
        *training("alexnet", "int2s", 0.3, finished=False),
        *training(inception, "fp32", 0.85, 0.86),
        *training(inception, "fp8", 0.1, bits=8.5),
        *training(inception, "fp10", 0.84, 0.845, bits=11.0),
        *training("vgg16", "fp32", 0.1),
        *training("vgg16", "fp8", 0.1),
    ]
    density = {
        "kind": "density",
        "model": "vgg16",
        "storage": 3,
        "module": "features.1",
        "op": "relu",
        "finished": True,
    }
    rows += [
        {**density, "step": step, "density": d, "zvc": 1.5, "csr": c} for step, d, c in ((0, 0.9, 0.9), (9, 0.5, 1.6))
    ]
    monkeypatch.setattr(accuracy_page, "PAGE", tmp_path / "accuracy.md")
    monkeypatch.setattr(accuracy_page, "PLOTS", tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert accuracy_page.main([str(tmp_path / "rows.jsonl")]) == 0
    text = (tmp_path / "accuracy.md").read_text().replace("\n", " ")
    for line in (
        "| `fp8` | not worse | 77.10 ± 0.10 | +0.00 [-0.2, +0.2] | 3 | 8.5 | 8.5 |",
        "| `int4s` |  | 76.00 | -1.10 | 1 | 4.5 | 4.5 |",  # of seed 1's 77.1
        "The fewest bits of a scheme that is not worse: 8.5, `fp8`.",
        "Not finished, and left out: `int2s` seed 0.",
        "| AlexNet trains in FP8 | AlexNet | `fp8` | reproduced | 77.10 | 77.10 | 3 |",
        "| Inception stops training in FP8 | Inception | `fp8` | reproduced | 85.00 | 10.00 | 1 |",
        "| Inception trains in FP10 | Inception | `fp10` | open | 85.50 | 84.25 | 2 |",
        "| VGG-16 does not train below FP16 | VGG-16 | `fp8` | fp32 did not train | 10.00 | 10.00 | 1 |",
        "| AlexNet | `fp8` | reproduced | 77.10 | 50.10 | +27.00 [+26.8, +27.2] | 3 |",
        "above 1 for 0 of 1 layers in the first step, and for 1 of 1 (layer, step) pairs later.",
        "| `features.1` | 0.90 | 0.50 | 0.90 | 1.25 | 1.60 |",
    ):
        assert line in text, line
    pictures = {"accuracy-alexnet.png", "accuracy-inception.png", "accuracy-vgg16.png", "accuracy-density.png"}
    assert pictures == {path.name for path in tmp_path.glob("*.png")} and all(
        f"plots/{name})" in text for name in pictures
    )
    rows += [{**row, "epochs": 3} for row in training("vgg16", "fp8", 0.1)]
    with pytest.raises(ValueError, match="rows of vgg16 must be of one number of epochs"):
        accuracy_page.page(rows)
