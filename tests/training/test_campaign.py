"""The driver of many trainings: time limits, resumption, one file of rows; and the page that is made of them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import accuracy_page
from gistkit.training import Accuracy
from tests.training.test_accuracy import figures, settings

HERE = "tests.training.test_accuracy"
ROOT = Path(__file__).parents[2]
PROGRAM = """
import multiprocessing, os, shutil, signal, sys, time
from pathlib import Path
import torch
import torch._dynamo  # else each child would, in 2 s
from bench import accuracy
from bench.accuracy import Entry
from tests.training.test_accuracy import Accuracy, settings
folder = Path(sys.argv[1])
out = folder / "new" / "rows.jsonl"
class Clock:
    time, sleep = time.time, time.sleep
    def monotonic():  # the time is over once what never ends has a row
        return time.monotonic() + 10**6 * (out.exists() and model in out.read_text())
def killed():
    def on_step(name, done):
        if done == 8:
            os.kill(os.getpid(), signal.SIGKILL)
    Accuracy(settings(schemes=("fp8",), epochs=2), folder / "killed").run(on_step)
torch.set_num_threads(1)
process = multiprocessing.get_context("fork").Process(target=killed)
process.start()
process.join()
print("killed by", -process.exitcode)
accuracy.time, accuracy.WRITE_S, accuracy.POLL_S = Clock, 0.1, 0.2
for model in ("tests.training.test_accuracy:linear", "tests.training.test_accuracy:random_images"):
    accuracy.CAMPAIGN = (
        Entry("tests.training.test_accuracy:normed", "fp32 fp8", range(1), 1, 256, 0.05, density=3),
        Entry(model, "fp32", range(1), 10**6, 256, 0.05),
    )
    print("status", accuracy.main(["--out", str(out), "--device", "cpu", "--jobs", "1"]), "campaign")
    shutil.copy(out, folder / f"{model[-6:]}.jsonl")
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(folder, what was printed) of a run that was killed and of two campaigns: one process for all, as a start of
    PyTorch takes 5 s, and one that has taken no step itself, as it is forked."""
    folder = tmp_path_factory.mktemp("ran")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(command, env=environment, timeout=500, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def rows_in(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_killed_process_leaves_what_another_goes_on_with(ran, tmp_path):
    (folder, said), threads = ran, torch.get_num_threads()
    killed, of = folder / "killed", settings(schemes=("fp8",), epochs=2)
    assert f"killed by {int(signal.SIGKILL)}" in said and len(figures(killed)) == 1
    with (killed / "rows.jsonl").open("a") as rows:
        rows.write('{"scheme": "fp8", "see')  # and one that was killed as it wrote
    torch.set_num_threads(1)  # sums depend on it
    try:
        assert Accuracy(of, killed).run() == Accuracy(of, tmp_path).run()
        assert figures(killed) == figures(tmp_path)
    finally:
        torch.set_num_threads(threads)


def test_a_campaign_within_a_time_limit(ran):
    folder, said = ran
    told, again, _ = said.split(" campaign")
    assert told.endswith("status 0") and told.count("done ") == 2 and told.count("stopped") == 1
    rows = rows_in(folder / "linear.jsonl")
    epochs = [r for r in rows if r["kind"] == "epoch"]
    assert all(r["tf32"] and r["data"] == "digits" and r["device"] == "cpu" for r in epochs)
    whole = [(r["model"], r["scheme"], r["epoch"]) for r in epochs if r["finished"]]
    assert whole == [(f"{HERE}:normed", name, 0) for name in ("fp32", "fp8")]
    # what never ends is killed, and its epochs are kept as unfinished
    assert {r["model"] for r in epochs if not r["finished"]} == {f"{HERE}:linear"}
    measured = {(r["model"], r["scheme"], r["seed"], r["step"]) for r in rows if r["kind"] == "density"}
    assert measured == {(f"{HERE}:normed", "fp32", 0, 0), (f"{HERE}:normed", "fp32", 0, 3)}
    # what is done is not run again; unfinished rows make room for a training that begins anew; what fails is told
    assert again.endswith("status 1") and "2 trainings are done, 1 to do" in again and "failed" in again
    assert rows_in(folder / "images.jsonl") == [r for r in rows if r["finished"]]


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
    density = {"kind": "density", "model": "vgg16", "module": "features.1", "op": "relu", "zvc": 1.5, "finished": True}
    density |= {"storage": 3}
    rows += [{**density, "step": step, "density": d, "csr": c} for step, d, c in ((0, 0.9, 0.9), (9, 0.5, 1.6))]
    monkeypatch.setattr(accuracy_page, "PAGE", tmp_path / "accuracy.md")
    monkeypatch.setattr(accuracy_page, "PLOTS", tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert accuracy_page.main([str(tmp_path / "rows.jsonl")]) == 0
    text = (tmp_path / "accuracy.md").read_text().replace("\n", " ")
    for line in (
        "| `fp8` | not worse | 77.10 ± 0.10 | +0.00 [-0.2, +0.2] | 3 | 8.5 | 8.5 |",
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
    assert pictures == {path.name for path in tmp_path.glob("*.png")}
    assert all(f"plots/{name})" in text for name in pictures)
    rows += [{**row, "epochs": 3} for row in training("vgg16", "fp8", 0.1)]
    with pytest.raises(ValueError, match="rows of vgg16 must be of one number of epochs"):
        accuracy_page.page(rows)
