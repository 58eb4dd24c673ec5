"""Machine code of the kernels that pack into a lane: no spills, and whole words in a row go out."""

import pytest

from gistkit.kernels.sparse.lane import NUM_WARPS, PIECE, STEP, place_kernel, ship_kernel, unship_kernel
from tests.aot.harness import compile_kernel

ITEMS = {1: "*u8", 2: "*i16", 4: "*i32"}


@pytest.mark.parametrize(
    "capability, item, columns",
    [*((90, item, columns) for item in ITEMS for columns in (False, True)), (80, 2, False), (100, 2, True)],
)
def test_packing_and_fetching(capability, item, columns):
    kind = ITEMS[item]
    ship = compile_kernel(
        ship_kernel,
        {
            "scratch_ptr": kind, "columns_ptr": "*u8" if columns else kind, "counts_ptr": "*i16", "ends_ptr": "*i64",
            "heads_ptr": "*i32", "lane_ptr": kind, "lane_bytes_ptr": "*u8", "place_ptr": "*i64", "slots": "i32",
        },
        {"STRIDE": 256 if columns else 1024, "STEP": STEP, "COLUMNS": columns, "ALIGN": 512},
        capability,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    fetch = compile_kernel(
        unship_kernel,
        {
            "lane_ptr": kind, "lane_bytes_ptr": "*u8", "place_ptr": "*i64", "values_ptr": kind,
            "columns_ptr": "*u8" if columns else kind,
        },
        {"PIECE": PIECE, "COLUMNS": columns, "ALIGN": 512},
        capability,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    place = compile_kernel(
        place_kernel,
        {"ends_ptr": "*i64", "cursor_ptr": "*i64", "place_ptr": "*i64", "slots": "i32"},
        {"ITEM": item, "COLUMNS": columns, "ALIGN": 512},
        capability,
        num_warps=1,
    )
    assert ship.spills == fetch.spills == place.spills == 0
