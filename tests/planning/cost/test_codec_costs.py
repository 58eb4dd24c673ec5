"""The planner's codec costs are what the checked-in rows say, and give the times of these rows back."""

import pytest

from bench import codec_costs
from bench.papers.common import RESULTS
from bench.rows import read
from gistkit.planning.cost.codec_costs import EMPTY, MEASURED
from gistkit.planning.cost.devices import PRESETS
from gistkit.planning.cost.table import CostTable

FILES = sorted(RESULTS.glob("2026-11-20-h200-layers*.jsonl"))
H200 = CostTable(PRESETS["h200"], (), {})


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
