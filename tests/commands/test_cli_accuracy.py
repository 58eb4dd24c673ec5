"""``gistkit accuracy`` as a user meets it."""

import json

from PIL import Image

from gistkit import cli
from gistkit.training import accuracy
from tests.training.test_accuracy import decoded


def test_the_main_job(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(accuracy, "device_images", decoded)
    short = ["accuracy", "tests.training.test_accuracy:normed", "--epochs", "1", "--batch", "256", "--device", "cpu"]
    schemes = ["--schemes", "fp32, gradients:fp8", "--seeds", "2", "--density", "4"]
    run = [*short, *schemes, "--out", str(tmp_path / "rows"), "--plot", str(tmp_path / "new" / "curves.png")]
    assert cli.main(run) == 0
    shown = capsys.readouterr()
    text = " ".join(shown.out.split())
    for part in ("gradients:fp8", "minus fp32", "bits", "MiB", "verdict", "360 test images", "over 2 seeds"):
        assert part in text
    assert "100%" not in shown.err and "10/10" in shown.err  # two seeds of five steps
    rows = [json.loads(line) for line in (tmp_path / "rows" / "rows.jsonl").read_text().splitlines()]
    names = ("fp32", "gradients:fp8")
    assert [(r["scheme"], r["seed"], r["epoch"]) for r in rows] == [
        (name, seed, 0) for seed in (0, 1) for name in names
    ]
    assert all(0 <= r["accuracy"] <= 1 for r in rows)
    measured = {(r["scheme"], r["seed"], density["step"]) for r in rows for density in r["densities"]}
    assert measured == {("fp32", 0, 0), ("fp32", 0, 4)}
    with Image.open(tmp_path / "new" / "curves.png") as image:
        assert image.size == (1350, 840) and len(image.convert("RGB").getcolors(1 << 24)) > 20
    assert cli.main(run) == 0  # all is there
    assert capsys.readouterr().out == shown.out
    assert cli.main([*run, "--lr", "0.2"]) == 2
    assert "must hold rows of these settings, got lr 0.1 there and 0.2 here" in capsys.readouterr().err
