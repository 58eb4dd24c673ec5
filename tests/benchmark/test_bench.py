"""The benchmarks' own honesty: nothing wrong is timed, rows are complete, tables come from rows."""

import json
import re
import subprocess

import pytest
import torch

from bench import compare, steps, summary, table
from bench.rows import read
from gistkit.benchmark import measure, run
from gistkit.benchmark.cases import Case, Setting, Workload, codec_cases
from gistkit.benchmark.operators import operator_cases
from gistkit.codecs import CODECS

ROW_KEYS = {
    *("kind", "time_utc", "commit", "device", "gpu", "driver", "cpu", "python", "torch", "triton", "case", "family"),
    *("direction", "dtype", "size_mib", "density", "by_density", "lossless", "relative_error", "seed", "checked"),
    *("shape", "kept_ratio", "median_s", "p20_s", "p80_s", "host_s", "moved_bytes", "gbps", "copy_gbps"),
    "percent_of_copy",
}


def _broken(s: Setting) -> Workload:
    x = torch.zeros(s.numel)
    return Workload(lambda: x, lambda: -x, 1, (s.numel,))


def _raising(s: Setting) -> Workload:
    raise RuntimeError("no kernel")


def test_every_codec_and_direction_has_a_case():
    named = {(c.name, c.direction) for c in codec_cases()}
    assert {name for name, _ in named} == set(CODECS) - {"dense"}
    assert all({(n, "encode"), (n, "decode")} <= named for n in CODECS if n != "dense")
    assert {("zvc", "pack"), ("csr+fp8", "pack"), ("mask1", "relu_backward")} <= named
    assert ("fp8", "relu_backward") not in named and ("bits", "relu_backward") not in named


@pytest.mark.parametrize("case", codec_cases() + operator_cases(), ids=lambda c: f"{c.name}-{c.direction}")
def test_checks_pass_on_the_cpu(case):
    for dtype in case.dtypes or (torch.float32, torch.bfloat16, torch.float16):
        assert run.check(case, dtype, 0.5, "cpu", seed=0) == ""


@pytest.mark.parametrize(("make", "says"), [(_broken, "differs in bits"), (_raising, "RuntimeError: no kernel")])
def test_what_fails_its_check_is_not_timed(make, says):
    case = Case("wrong", "encode", "codec", make)
    (row,) = run.rows([(case, torch.float32, 0.5, 0.01)], "cpu", 0, True, 60.0)
    assert says in row["error"] and row["checked"] is False and "median_s" not in row


def test_bit_equality_sees_zeros_signs_and_nan():
    zero, nan = torch.zeros(2), torch.full((2,), float("nan"))
    assert measure.bit_equal(nan, nan.clone()) and not measure.bit_equal(zero, -zero)
    assert not measure.bit_equal(zero, zero.double()) and not measure.bit_equal(zero, zero[:1])
    assert measure.difference((zero, [nan]), (zero, [nan])) == ""
    assert measure.difference(zero, (zero, zero)) == "1 tensors instead of 2"


def test_moved_bytes_of_sparse_encode_count_stored_elements_only():
    case = next(c for c in codec_cases() if (c.name, c.direction) == ("zvc", "encode"))
    s = Setting("cpu", torch.float32, 1 << 20, 0.25, seed=3)
    n = s.numel
    moved = case.make(s).moved_bytes
    words_and_counts = n // 8 + 2 * (n // 1024)
    stored = (moved - 4 * n - words_and_counts) // 4
    # Binomial with p = 1/4: five standard deviations are 5 * sqrt(n * 3/16) = 1109 of 65536.
    assert abs(stored - n / 4) < 1109


def test_what_is_kept_and_how_exactly_goes_with_each_row():
    todo = run.jobs(run.all_cases(("codec", "rival")), [torch.float32], [0.01], on_gpu=False)
    wanted = ("mask1", "fp8", "fp10s", "zvc", "torch .to(float8_e4m3fn)")
    todo = [j for j in todo if j[0].name in wanted and j[0].direction == "encode" and j[2] == 0.5]
    rows = {r["case"]: r for r in run.rows(todo, "cpu", 0, True, 60.0)}
    told = {name: (r["lossless"], r["relative_error"]) for name, r in rows.items()}
    # Half a unit of the last of 3, 4 and 3 mantissa bits; a mask keeps no values.
    assert told == {
        "mask1": (False, None),
        "zvc": (True, None),
        "fp8": (False, 2**-4),
        "fp10s": (False, 2**-5),
        "torch .to(float8_e4m3fn)": (False, 2**-4),
    }
    n = Setting("cpu", torch.float32, int(0.01 * measure.MIB), 0.5).numel
    assert rows["mask1"]["kept_ratio"] == -(-n // 8) / (4 * n) and rows["fp8"]["kept_ratio"] == 0.25
    assert 17 / 32 < rows["zvc"]["kept_ratio"] < 0.6  # a bit and half a value each, and 2 bytes a slot of 1024


def test_densities_that_are_asked_for_replace_those_of_sparse_cases_alone():
    of = {(c.name, d) for c, _, d, _ in run.jobs(codec_cases(), [torch.float32], [1.0], False, [0.2, 0.7])}
    assert {d for name, d in of if name in ("zvc", "csr+fp8")} == {0.2, 0.7}
    assert {d for name, d in of if name in ("fp8", "mask1", "argmax4")} == {0.5}


def test_time_limit_starts_nothing_more():
    todo = run.jobs(operator_cases(), [torch.float32], [0.01], on_gpu=False)
    assert list(run.rows(todo, "cpu", 0, True, 0.0)) == []


def test_a_copy_that_does_not_fit_fails_the_rows_of_its_size_alone(monkeypatch):
    def copy_gbps(nbytes: int, device: str, *, quick: bool) -> float:
        if nbytes > measure.MIB:
            raise RuntimeError("out of memory")
        return 1.0

    monkeypatch.setattr(run, "copy_gbps", copy_gbps)
    case = next(c for c in codec_cases() if c.name == "mask1")
    small, large = run.rows(run.jobs([case], [torch.float32], [0.01, 2.0], False), "cpu", 0, True, 60.0)
    assert "error" not in small and large["error"] == "RuntimeError: out of memory" and not large["checked"]


def test_a_commit_is_that_of_the_checkout_which_tracks_the_package(tmp_path, monkeypatch):
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
        subprocess.run(("git", "-C", str(tmp_path), *who, *arguments), check=True, capture_output=True)

    for name in ("measure.py", "installed.py"):
        (tmp_path / name).touch()
    git("init")
    git("add", "measure.py")
    git("commit", "-m", "one")
    monkeypatch.setattr(measure, "__file__", str(tmp_path / "measure.py"))
    assert re.fullmatch("[0-9a-f]{7,}", measure._commit())
    # A package in a virtual environment inside of somebody else's repository.
    monkeypatch.setattr(measure, "__file__", str(tmp_path / "installed.py"))
    assert measure._commit() == ""


def _row(low: float, middle: float, high: float, **more) -> dict:
    case = {"kind": "layer", "case": "zvc", "direction": "encode", "dtype": "float32", "size_mib": 64, "density": 0.5}
    return {**case, "p20_s": low, "median_s": middle, "p80_s": high, **more}


def test_compare_calls_only_separate_ranges_a_change():
    old = _row(1.0, 1.1, 1.2)
    assert compare.verdict(old, _row(0.8, 0.85, 0.9)) == "faster"
    assert compare.verdict(old, _row(1.3, 1.4, 1.5)) == "slower"
    assert compare.verdict(old, _row(1.15, 1.3, 1.5)) == "same"
    assert compare.verdict(old, _row(0.8, 0.9, 1.05)) == "same"
    assert compare.verdict(old, {**old, "error": "x"}) == "broken"
    assert compare.verdict({**old, "error": "x"}, old) == "fixed"
    assert compare.compare([old], [_row(2.0, 2.2, 2.4), {**old, "density": 0.1}])[0][1:] == ("slower", 2.0)


def _step(variant: str, **more) -> dict:
    places = {
        "gpu": "H200",
        "cpu": "",
        "torch": "2.11",
        "triton": "3.6",
        "time_utc": "2026-11-20T00:00:00",
        "commit": "a",
    }
    sizes = {"model": "vgg16", "dtype": "float32", "batch": 64, "image": 224, "kept_bytes": 2**30, "peak_bytes": 2**31}
    return {"kind": "step", "variant": variant, "median_s": 0.1, **places, **sizes, **more}


def test_table_fills_its_markers_and_nothing_else():
    text = "before\n<!-- bench:step -->\nold\n<!-- /bench:step -->\nafter\n"
    ours = {"kept_ratio": 3.3, "peak_ratio": 1.0, "slowdown": 1.05, "loss_equals_plain": True, "kept_bytes": 2**28}
    rows = [_step("plain"), _step("gistkit", **ours), _step("compile", error="no compiler")]
    done = table.filled(text, rows)
    assert done.startswith("before\n<!-- bench:step -->\n| network") and done.endswith("<!-- /bench:step -->\nafter\n")
    assert "| vgg16 | float32 | gistkit | 256.0 (3.30x less) | 2,048.0 | 100.0 (+5 %) | yes |" in done
    assert "| compile | failed |" in done and "old" not in done
    assert "H200, torch 2.11, triton 3.6, 2026-11-20, commit a, batch 64, 224² images." in done
    assert table.filled(done, rows) == done
    on_cpu = table.filled(text, [_step("plain", gpu="", cpu="x86_64"), _step("gistkit", gpu="", cpu="x86_64", **ours)])
    assert "time" not in on_cpu and "| vgg16 | float32 | gistkit | 256.0 (3.30x less) | 2,048.0 | yes |" in on_cpu


@pytest.mark.parametrize("text", ["no marker", "<!-- bench:step --> without an end"])
def test_table_refuses_a_file_without_markers(tmp_path, capsys, text):
    readme, rows = tmp_path / "README.md", tmp_path / "rows.jsonl"
    readme.write_text(text)
    rows.write_text(json.dumps(_step("plain")) + "\n")
    assert table.main([str(readme), str(rows)]) == 2
    assert re.search("marker|needs its", capsys.readouterr().err)
    assert readme.read_text() == text


def test_a_line_that_is_no_row_is_named(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n{oops\n")
    with pytest.raises(ValueError, match="line 2: expected one JSON object a line"):
        read(rows)


def test_steps_set_variants_beside_plain(tmp_path):
    out = tmp_path / "steps.jsonl"
    names = ["plain", "checkpoint", "save_on_cpu", "gistkit"]
    size = ["--models", "alexnet", "--batch", "4", "--image", "32", "--steps", "1"]
    assert steps.main(["--device", "cpu", "--out", str(out), *size, "--variants", ",".join(names)]) == 0
    plain, *others = rows = read(out, "step")
    assert [r["variant"] for r in rows] == names and not any("error" in r for r in rows)
    assert all(r["loss_equals_plain"] and r["peak_bytes"] >= r["kept_bytes"] > 0 for r in rows)
    checkpointed, _, ours = others
    assert checkpointed["kept_bytes"] < ours["kept_bytes"] < plain["kept_bytes"]


def test_steps_start_nothing_when_their_time_is_over(tmp_path, capsys):
    out = tmp_path / "steps.jsonl"
    args = ["--device", "cpu", "--out", str(out), "--models", "vgg16", "--variants", "plain,gistkit", "--max-s", "0"]
    assert steps.main(args) == 0
    assert out.read_text() == ""
    assert "not run: vgg16 fp32 plain, vgg16 fp32 gistkit" in capsys.readouterr().err


def test_unknown_variant_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        steps.main(["--out", str(tmp_path / "x"), "--variants", "magic"])
    assert "--variants must be of plain, compile, checkpoint" in capsys.readouterr().err


def test_a_step_that_keeps_nothing_on_the_device_has_no_ratio():
    plain = _step("plain", losses=[1.0])
    row = steps.with_plain(_step("save_on_cpu", losses=[1.0], kept_bytes=512), plain)
    assert row["kept_ratio"] is None and row["peak_ratio"] == 1.0 and row["loss_equals_plain"]
    columns = {c.header: list(c.cells) for c in steps.table([plain, row]).columns}
    assert columns["kept x"] == ["", "all"] and columns["peak x"] == ["", "1.00"]


_FAILED = """<failure message="x">def test_a():\nE   assert 1 == 2\nE    + where\n\nt.py:1</failure>"""
REPORT = f"""<testsuites><testsuite tests="5">
<testcase name="test_a[1]">{_FAILED}</testcase><testcase name="test_a[2]">{_FAILED}</testcase>
<testcase name="test_b"><error message="no fixture"/></testcase>
<testcase name="test_c"/><testcase name="test_d"><skipped/></testcase>
</testsuite></testsuites>"""


def test_summary_groups_what_failed(tmp_path, capsys):
    (tmp_path / "test_x.xml").write_text(REPORT)
    (tmp_path / "test_x.log").write_text("")
    (tmp_path / "test_y.log").write_text("collecting\nKilled\n\n")
    rows = tmp_path / "layers.jsonl"
    failed = [_row(1.0, 1.0, 1.0, error="differs", size_mib=size) for size in (64, 256, 512, 1024)]
    rows.write_text("".join(json.dumps(r) + "\n" for r in [_row(1.0, 1.1, 1.2), *failed]))
    assert summary.main([str(tmp_path), str(rows), str(tmp_path / "never.jsonl")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "test_x: 1 passed, 3 failed, 1 skipped",
        "  test_a (2): assert 1 == 2 / + where",
        "  test_b (1): no fixture",
        "test_y: no report, it was cut or never began: Killed",
        "layers.jsonl",
        "5 rows, 4 failed",
        "  differs (4): zvc encode float32 64 0.5; zvc encode float32 256 0.5; zvc encode float32 512 0.5 and 1 more",
    ]
