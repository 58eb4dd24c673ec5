"""``gistkit bench`` as a user meets it: table, files, picture, exit status, one line for wrong input."""

import json
import re
import subprocess
import sys

import pytest
import torch
from PIL import Image

from gistkit import cli
from gistkit.benchmark.cases import Case, Workload
from gistkit.benchmark.picture import COLOURS, COPY, plot_rows
from gistkit.commands import bench
from gistkit.version import VERSION

QUICK = ["bench", "--device", "cpu", "--quick", "--sizes-mib", "0.05"]


def rgb(colour):
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def test_the_main_job(tmp_path, capsys):
    lines, numbers, picture = (tmp_path / "new" / name for name in ("rows.jsonl", "rows.json", "speed.png"))
    files = ["--out", str(lines), "--json", str(numbers), "--plot", str(picture)]
    assert cli.main([*QUICK, "--codec", "mask1", "zvc+fp8", "--dtypes", "fp32,bf16", *files]) == 0
    shown = capsys.readouterr()
    for text in ("mask1", "zvc+fp8", "relu_backward", "pack", "6.25%", "sign", "bytes", "GB/s", "of copy"):
        assert text in shown.out
    assert "16 rows, 0 failed, 0 not started" in shown.out and "16/16" in shown.err
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    raw = json.loads(numbers.read_text())
    assert raw["rows"] == rows and raw["planned"] == 16 and raw["environment"]["torch"] == torch.__version__
    with Image.open(picture) as image:
        pixels = {colour: count for count, colour in image.convert("RGB").getcolors(1 << 24)}
        height = image.size[1]
    assert {rgb(COLOURS[0]), rgb(COLOURS[1])} <= set(pixels)
    assert pixels[rgb(COPY)] > height // 2  # of four dashed lines, more than the legend's


@pytest.mark.parametrize("arguments", [["--codec", "zvc", "fp8"], ["--family", "operator", "rival", "--only", "3x3s2"]])
def test_a_table_fits_eighty_columns(arguments, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([*QUICK, "--sizes-mib", "0.05,0.1", "--dtypes", "fp32,bf16", *arguments]) == 0
    out = capsys.readouterr().out
    assert "…" not in out and max(map(len, out.splitlines())) <= 80


def test_what_is_the_same_in_all_rows_stands_in_the_title(capsys):
    assert cli.main([*QUICK, "--codec", "csr", "--density", "0.25"]) == 0
    title, _, rest = " ".join(capsys.readouterr().out.split()).partition(" codec direction ")
    assert title.endswith(", fp32, 0.05 MiB, density 0.25") and rest.startswith("bytes error ms GB/s of copy")


def test_default_is_every_codec_on_little_data():
    options = cli._parser().parse_args(["bench", "--device", "cpu"])
    plan = bench._prepare(options)
    assert {c.family for c, *_ in plan.jobs} == {"codec"} and {s for *_, s in plan.jobs} == {4.0}
    assert {d for c, d, *_ in plan.jobs if c.dtypes is None} == {torch.float32}


def test_wrong_bits_are_status_one_and_no_time(monkeypatch, capsys, tmp_path):
    def broken(s):
        x = torch.zeros(s.numel)
        return Workload(lambda: x, lambda: -x, 1, (s.numel,))

    monkeypatch.setattr(bench, "all_cases", lambda families: [Case("mask1", "encode", "codec", broken)])
    picture = tmp_path / "empty.png"
    assert cli.main([*QUICK, "--plot", str(picture)]) == 1
    shown = capsys.readouterr()
    assert "failed" in shown.out and "1 rows, 1 failed" in shown.out
    assert "mask1 encode float32 0.05 MiB: output 0: torch.float32" in shown.err
    with Image.open(picture) as image:
        assert image.size[0] > 1000


def test_a_time_limit_is_told(capsys):
    assert cli.main([*QUICK, "--codec", "mask1", "--max-s", "0"]) == 0
    shown = capsys.readouterr()
    assert "gistkit: 0 s are over; 3 of 3 were not started" in shown.err
    assert shown.out == "0 rows, 0 failed, 3 not started\n"


def test_the_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0 and capsys.readouterr().out == f"gistkit {VERSION}\n"


def test_it_runs_with_little_installed():
    """On a machine with a GPU there may be torch, triton, numpy and rich alone, and no console script."""
    code = (
        "import sys, runpy\n"
        "for name in ('scipy', 'matplotlib', 'PIL', 'sklearn', 'hypothesis'): sys.modules[name] = None\n"
        f"sys.argv = ['gistkit', *{[*QUICK, '--codec', 'mask1']!r}]\n"
        "runpy.run_module('gistkit', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "3 rows, 0 failed" in done.stdout, done.stderr


def test_a_wide_range_is_told_in_plain_numbers(tmp_path):
    """On a logarithmic axis; an SVG has each text in a comment."""
    row = {"family": "codec", "case": "zvc", "by_density": False, "dtype": "float32", "direction": "encode"}
    row |= {"size_mib": 4, "copy_gbps": 60.0, "percent_of_copy": 1.0, "gpu": "", "cpu": "a core", "torch": "2"}
    picture = tmp_path / "speed.svg"
    plot_rows([{**row, "gbps": 0.6}, {**row, "direction": "decode", "gbps": 6.0}], picture)
    texts = re.findall(r"<!-- (.*?) -->", picture.read_text())
    assert {"1", "10", "100", "GB/s"} <= set(texts) and not any("$" in text for text in texts)
