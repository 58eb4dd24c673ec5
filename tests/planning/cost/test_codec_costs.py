"""The planner's codec costs are what the checked-in rows say, and give the times of these rows back."""

import json

import pytest

from bench import codec_costs
from bench.papers.common import RESULTS
from bench.rows import read
from gistkit.planning.cost.codec_costs import EMPTY, MEASURED, Passes
from gistkit.planning.cost.devices import PRESETS
from gistkit.planning.cost.table import CostTable

FILES = sorted(RESULTS.glob("2026-11-20-h200-layers*.jsonl"))
H200 = CostTable(PRESETS["h200"], (), {})


def row(size_mib, seconds, direction="encode", density=0.5, case="zvc", dtype="float32"):
    told = {"kind": "layer", "family": "codec", "gpu": "a", "torch": "b", "triton": "c", "copy_gbps": 1000.0}
    named = {"case": case, "direction": direction, "dtype": dtype, "density": density}
    return {**told, **named, "size_mib": size_mib, "median_s": seconds}


def test_the_tables_are_made_of_the_checked_in_rows():
    rows = [r for path in FILES for r in read(path, "layer")]
    assert len({r["size_mib"] for r in rows}) == 3
    assert codec_costs.tables(rows) == (MEASURED, EMPTY)


@pytest.mark.parametrize(("size_mib", "least", "most"), [(512, 0.96, 1.03), (256, 0.89, 1.05), (64, 0.83, 1.18)])
def test_predicted_seconds_are_those_of_the_rows(size_mib, least, most):
    """The bounds are what was found: at 64 MiB a launch is a third of a row, and takes 4 us to 15 where all are charged
    8; at 256 MiB packing fp10 takes two passes more of the packed codes, out of a smaller cache."""
    (path,) = (p for p in FILES if read(p)[0]["size_mib"] == size_mib)
    told = codec_costs.predictions(read(path), H200)
    assert len(told) == 122
    assert all(least <= seconds / r["median_s"] <= most for seconds, r in told)


def test_a_figure_is_what_a_further_byte_takes_over_a_copys():
    # a copy of 1 GB/ms takes 2 MiB / (1000 GB/s) for each MiB: one pass is half of that
    pass_s = codec_costs.MIB / 1e12
    rows = [row(size, 5e-6 + size * 1.5 * pass_s) for size in (64.0, 256.0, 512.0)]
    rows += [row(size, 9e-6 + size * 1.1 * pass_s, density=0.1) for size in (64.0, 256.0, 512.0)]
    measured, empty = codec_costs.tables(rows)
    assert measured["zvc"][0] == Passes(1.5, 0.0, 0.0)
    assert empty["zvc"][0] == Passes(1.0, 0.0, 0.0)
    assert measured["zvc"][1] == Passes(0.0, 0.0, 0.0)
    assert '"zvc": (P(1.50, 0.00, 0.00), P(0.00, 0.00, 0.00)),' in codec_costs.source("MEASURED", measured)


def test_rows_that_make_no_table_are_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match="rows must be of at least two sizes"):
        codec_costs.tables([row(64.0, 1.0)])
    with pytest.raises(ValueError, match="rows must be of one device and version"):
        codec_costs.tables([row(64.0, 1.0), {**row(512.0, 2.0), "gpu": "another"}])
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row(64.0, 1.0)))
    assert codec_costs.main([str(path)]) == 2
    assert "bench.codec_costs: rows must be of at least two sizes" in capsys.readouterr().err


def test_the_command_prints_what_is_checked_in(capsys):
    assert codec_costs.main([str(path) for path in FILES]) == 0
    out = capsys.readouterr().out
    assert codec_costs.source("EMPTY", EMPTY) in out and "64 MiB: median 0.93" in out
