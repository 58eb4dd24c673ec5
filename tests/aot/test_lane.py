"""Machine code of the kernels that pack into a lane: no spills, and whole words in a row go out."""

import pytest

from gistkit.kernels.sparse import lane
from tests.aot.harness import compile_kernel

ITEMS = {1: "*u8", 2: "*i16", 4: "*i32"}


@pytest.mark.parametrize("group", [0, lane.GROUP])
@pytest.mark.parametrize("capability, item, columns", [(90, 1, False), (90, 4, True), (80, 2, False), (100, 2, True)])
def test_packing_and_fetching(capability, item, columns, group):
    kind = ITEMS[item]
    step = lane.items_a_block(item, columns)
    ship = compile_kernel(
        lane.ship_kernel,
        {
            "scratch_ptr": kind, "columns_ptr": "*u8", "words_ptr": "*i32", "counts_ptr": "*i16", "ends_ptr": "*i64",
            "heads_ptr": "*i32", "lane_ptr": kind, "lane_bytes_ptr": "*u8", "lane_words_ptr": "*i32",
            "lane_counts_ptr": "*i16", "begin_ptr": "*i64", "after_ptr": "*i64", "place_ptr": "*i64", "slots": "i32",
        },
        {
            "STRIDE": 256 if columns else 1024, "STEP": step, "COLUMNS": columns, "ALIGN": 512, "RUN": lane.RUN_BYTES,
            "GROUP": group,
        },
        capability,
        num_warps=lane.NUM_WARPS,
    )  # fmt: skip
    fetch = compile_kernel(
        lane.unship_kernel,
        {
            "lane_ptr": kind, "lane_bytes_ptr": "*u8", "lane_words_ptr": "*i32", "place_ptr": "*i64",
            "known_ptr": "*i32", "values_ptr": kind, "columns_ptr": "*u8" if columns else kind, "lines": "i32",
        },
        {"PIECE": lane.PIECE, "COLUMNS": columns, "ALIGN": 512, "RUN": lane.RUN_BYTES},
        capability,
        num_warps=lane.PIECE_WARPS,
    )  # fmt: skip
    index = compile_kernel(
        lane.index_kernel,
        {"counts_ptr": "*i16", "ends_ptr": "*i64", "heads_ptr": "*i32", "slots": "i32"},
        {"GROUP": lane.GROUP, "ROUND": lane.ROUND, "STEP": step},
        capability,
        num_warps=lane.COUNTING_WARPS,
    )
    assert ship.stack_bytes == fetch.stack_bytes == index.stack_bytes == 0
    assert ship.registers * lane.NUM_WARPS * 32 <= 65536 and len(index.sass_lines) <= 640
    # a warp writes whole lines of 128 bytes at once
    lane_bytes = step * item // (lane.NUM_WARPS * 32)
    assert lane_bytes in (8, 16) and ship.stores_128 >= (lane_bytes == 16) + (1 if columns else 2)
