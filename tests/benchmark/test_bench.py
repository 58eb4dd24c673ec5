"""The benchmarks' own honesty: nothing wrong is timed, rows are complete, tables come from rows."""

import pytest
import torch

from bench import densities, sanitized, steps, table
from bench.layer_operators import operator_cases
from bench.rows import read
from gistkit.benchmark import measure
from gistkit.benchmark.cases import Case, Setting, Workload, codec_cases
from gistkit.codecs import CODECS


def broken(s: Setting) -> Workload:
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
        assert measure.check(case, dtype, 0.5, "cpu") == ""


@pytest.mark.parametrize(("make", "says"), [(broken, "differs in bits"), (_raising, "RuntimeError: no kernel")])
def test_what_fails_its_check_is_not_timed(make, says):
    case = Case("wrong", "encode", "codec", make)
    (row,) = measure.rows([(case, torch.float32, 0.5, 0.01)], "cpu", True)
    assert says in row["error"] and row["checked"] is False and "median_s" not in row


def test_bit_equality_sees_zeros_signs_and_nan():
    zero, nan = torch.zeros(2), torch.full((2,), float("nan"))
    assert measure.bit_equal(nan, nan.clone()) and not measure.bit_equal(zero, -zero)
    assert not measure.bit_equal(zero, zero.double()) and not measure.bit_equal(zero, zero[:1])
    assert measure.difference((zero, [nan]), (zero, [nan])) == ""
    assert measure.difference(zero, (zero, zero)) == "1 tensors instead of 2"


def test_table_fills_its_markers_and_compares_compiled_steps_within_a_commit():
    def row(variant, commit, kept, **more):
        places = {"gpu": "H200", "cpu": "", "torch": "2.11", "triton": "3.6", "time_utc": "2026-11-24", "mode": ""}
        sizes = {"kept_mib": kept, "peak_mib": 2 * kept, "device_ms": 10.0, "repeats": 4}
        case = {"kind": "compiled", "model": "vgg16", "conf": "bf16", "variant": variant, "commit": commit}
        return case | places | sizes | more

    rows = [row("compile deterministic", "a", 100.0), row("gistkit fp8s", "a", 25.0)]
    rows += [row("compile deterministic", "b", 80.0), row("gistkit deterministic", "b", 40.0, equal=4, of=4)]
    done = table.filled("before\n<!-- bench:compiled-rows -->\nold\n<!-- /bench:compiled-rows -->\nafter\n", rows)
    assert done.startswith("before\n<!-- bench:compiled-rows -->\n| network") and "old" not in done
    assert done.endswith("<!-- /bench:compiled-rows -->\nafter\n") and table.filled(done, rows) == done
    assert "| bitwise | 80 → 40 (2.00x less) | 160 → 80 (2.00x less) | 10.0 → 10.0 (+0 %) | 4 of 4 |" in done
    assert "| fp8s | 100 → 25 (4.00x less) |" in done and "commit a / b" in done
    done = table.filled("<!-- bench:compiled -->\n<!-- /bench:compiled -->\n", rows)
    assert "| vgg16 | bf16 | 80 MiB, 160 MiB, 10.0 ms | 2.00x, 2.00x, +0 % |  | 4.00x, 4.00x, +0 % |" in done
    with pytest.raises(ValueError, match="bench:compiled"):
        table.filled("", rows)


def test_table_of_steps_under_budgets_says_what_fits_and_which_is_fastest():
    gib, common = 2**30, {"kind": "prediction", "model": "m", "batch": 8, "dtype": "tf32", "channels_last": True}
    common |= {"gpu": "H100", "cpu": "", "torch": "2", "triton": "3", "time_utc": "2026-01-01T0", "commit": "abc"}

    def row(policy, budget, ms, peak, **planned):
        measured = {"measured_s": ms / 1e3, "measured_peak_bytes": int(peak * gib)}
        return {**common, "policy": policy, "budget": budget, **measured, **planned}

    def plan(ms, of_ms, peak, budget_gib):
        budget_bytes = budget_gib and budget_gib * gib
        return {"predicted_s": ms / 1e3, "ratio": ms / of_ms, "peak_bytes": peak * gib, "budget_bytes": budget_bytes}

    rows = [
        row("plain", "", 100, 19, **plan(100, 100, 20, None)),
        row("torch:checkpoint", "", 130, 13),
        row("optimal", "12GiB", 110, 10, **plan(120, 110, 10, 12)),
        row("vdnn-all", "12GiB", 50, 15, **plan(70, 50, 15, None)),
        {**common, "policy": "cdma", "budget": "12GiB", "error": "no"},
        row("optimal", "14GiB", 140, 14.5, **plan(140, 140, 14, 14)),
    ]
    done = table.filled("<!-- bench:prediction -->\n<!-- /bench:prediction -->\n", rows)
    for line in (
        "| m (8) | tf32 channels_last, 12GiB | tf32 channels_last, 14GiB |",
        "| plain | 100 (100) ms, 19.0 (20.0) GiB | 100 (100) ms, 19.0 (20.0) GiB |",
        "| PyTorch's checkpoint | 130 ms, 13.0 GiB | **130 ms, 13.0 GiB** |",
        "| optimal | **110 (120) ms, 10.0 (10.0) GiB** | 140 (140) ms, 14.5 (14.0) GiB |",
        "| vdnn-all | 50 (70) ms, 15.0 (15.0) GiB† |  |",
        "| cdma | failed |  |",
        "in 1 of 2 columns. 3 of 4 predicted steps are within 15 %; measured peaks are -5.0 to +3.6 % off",
        "ones, 1 above their budget.",
    ):
        assert line in done


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


def test_the_run_for_the_sanitizer_gives_the_same_bits(capsys):
    assert sanitized.main(["--device", "cpu"]) == 0
    assert "other bits: none" in capsys.readouterr().out


def test_densities_of_a_network_are_taken_once(tmp_path, capsys, monkeypatch):
    def rows(name, options):
        common = {"kind": "density", "model": name, "accuracy": 0.9, "epochs": options.epochs}
        steps = ((0, 0.5, 0.5), (40, 0.2, 0.4))
        return [
            {**common, "step": s, "elements": n, "density": d}
            for s, *ds in steps
            for n, d in zip((3, 1), ds, strict=True)
        ]

    monkeypatch.setattr(densities, "rows", rows)
    out = tmp_path / "rows.jsonl"
    assert densities.main(["--out", str(out), "--models", "nin"]) == 0
    assert densities.main(["--out", str(out), "--models", "nin,vgg16"]) == 0
    line = "accuracy 0.900, density 0.500 at step 0, 0.250 at step 40, by layer 0.200 to 0.400"
    assert capsys.readouterr().out == f"nin: {line}\nvgg16: {line}\n"
    assert [row["model"] for row in read(out)] == 4 * ["nin"] + 4 * ["vgg16"]
