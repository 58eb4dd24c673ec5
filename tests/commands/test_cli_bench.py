"""``gistkit bench`` as a user meets it: table, file, exit status, one line for wrong input."""

import json

import pytest
import torch

from gistkit import cli
from gistkit.benchmark.cases import Case
from gistkit.commands import bench
from gistkit.version import VERSION
from tests.benchmark.test_bench import broken

QUICK = ["bench", "--device", "cpu", "--quick", "--sizes-mib", "0.05"]


def test_the_main_job(tmp_path, capsys):
    numbers = tmp_path / "new" / "rows.json"
    assert cli.main([*QUICK, "--codec", "mask1", "zvc+fp8", "--dtypes", "fp32", "bf16", "--json", str(numbers)]) == 0
    shown = capsys.readouterr()
    for text in ("mask1", "zvc+fp8", "relu_backward", "pack", "6.25%", "sign", "bytes", "GB/s", "of copy"):
        assert text in shown.out
    assert "16 rows, 0 failed" in shown.out and "16/16" in shown.err
    raw = json.loads(numbers.read_text())
    assert len(raw["rows"]) == 16 and raw["environment"]["torch"] == torch.__version__


def test_a_table_fits_eighty_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([*QUICK, "--sizes-mib", "0.01", "0.02", "--dtypes", "fp32", "bf16", "--codec", "csr", "fp8"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out and max(map(len, out.splitlines())) <= 80


def test_default_is_every_codec_on_little_data():
    options = cli._parser().parse_args(["bench", "--device", "cpu"])
    _, todo = bench._prepare(options)
    assert {c.family for c, *_ in todo} == {"codec"} and {s for *_, s in todo} == {4.0}
    assert {d for c, d, *_ in todo if c.dtypes is None} == {torch.float32}


def test_wrong_bits_are_status_one_and_no_time(monkeypatch, capsys):
    monkeypatch.setattr(bench, "codec_cases", lambda: [Case("mask1", "encode", "codec", broken)])
    assert cli.main(QUICK) == 1
    shown = capsys.readouterr()
    assert "failed" in shown.out and "1 rows, 1 failed" in shown.out
    assert "mask1 encode float32 0.05 MiB: output 0: torch.float32" in shown.err


def test_the_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0 and capsys.readouterr().out == f"gistkit {VERSION}\n"
