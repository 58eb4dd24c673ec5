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


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--codec", "zvc", "csr+fp9"], "codec must be of mask1, .*; got 'csr.fp9'; did you mean 'csr.fp8'"),
        (["--codec", "dense"], "codec must be of mask1, .*; got 'dense'"),
        (["--only", "gzip"], "only: no case for cpu has 'gzip' in its name"),
        (["--dtypes", "fp32,fp64"], "dtypes must be of fp32, bf16, fp16 with commas between, got 'fp64'"),
        (["--sizes-mib", "0"], "sizes-mib must be numbers at least 0.01 with commas between, got '0' in '0'"),
        (["--sizes-mib", "64,much"], "got 'much' in '64,much'"),
        (["--sizes-mib", "inf"], "got 'inf'"),
        (["--density", "50"], "density must be numbers from 0.001 to 0.999 with commas between, got '50' in '50'"),
        (["--device", "tpu"], "bench: device must be cpu, cuda or cuda:N, got 'tpu'; name one of these"),
        (["--device", "cuda:99"], "bench: device must be there, got 'cuda:99', but torch sees . CUDA devices"),
        (["--max-s", "-1"], "max-s must be seconds, at least 0, got -1"),
        (["--plot", "speed.txt"], "plot file must end in .png, .svg or .pdf"),
        (["--out", "/proc/none/x.jsonl"], "No such file or directory|Permission"),
        (["--json", "."], "the file to write must not be a folder"),
    ],
)
def test_wrong_input_is_one_line_and_status_two(arguments, text, capsys):
    assert cli.main(["bench", "--device", "cpu", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert shown.err.startswith("gistkit: error: ")
    assert re.search(text, shown.err), shown.err


def test_codec_and_family_exclude_each_other(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main([*QUICK, "--codec", "zvc", "--family", "rival"])
    assert exit_.value.code == 2 and "not allowed with argument --codec" in capsys.readouterr().err


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
