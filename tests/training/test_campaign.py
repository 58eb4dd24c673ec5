"""The driver of many trainings: time limits, resumption, one file of rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = "tests.training.test_accuracy"
ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from bench import accuracy
from bench.accuracy import Entry
model = "tests.training.test_accuracy:normed"
accuracy.CAMPAIGN = (
    Entry(model, "fp32 fp8", range(1), 2, 256, 0.05, density=5),
    Entry(sys.argv[1], "fp32", range(1), 10**6, 256, 0.05),
)
sys.exit(accuracy.main(sys.argv[2:]))
"""


def run(last, *words):
    """The lines that the driver prints, and the status it exits with."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, last, "--device", "cpu", "--jobs", "2", *words]
    done = subprocess.run(command, env=environment, timeout=300, capture_output=True, text=True)
    return done.stdout, done.returncode


def rows_in(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_campaign_within_a_time_limit(tmp_path):
    out = tmp_path / "new" / "rows.jsonl"
    told, status = run(f"{HERE}:linear", "--out", str(out), "--max-s", "30")
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
    told, status = run(f"{HERE}:random_images", "--out", str(out))
    assert status == 1 and "2 trainings are done, 1 to do" in told and "failed" in told
    assert rows_in(out) == [r for r in rows if r["finished"]]
