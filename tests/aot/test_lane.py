"""Machine code of the kernels that pack into a lane: no spills, and whole words in a row go out."""

import pytest

from gistkit.kernels.sparse import lane
from tests.aot.harness import compile_kernel

ITEMS = {1: "*u8", 2: "*i16", 4: "*i32"}


@pytest.mark.parametrize("capability, item", [(90, 1), (90, 4), (80, 2), (100, 2)])
def test_packing_and_fetching(capability, item):
    step, values, counts = lane.BLOCK_BYTES // item, ITEMS[item], {"counts_ptr": "*i16", "ends_ptr": "*i64"}
    counts |= {"heads_ptr": "*i32", "slots": "i32"}
    kinds = dict.fromkeys(("begin_ptr", "after_ptr", "place_ptr"), "*i64") | counts
    kinds |= {"scratch_ptr": values, "lane_ptr": values, "words_ptr": "*i32"}
    kinds |= {"rest_words_ptr": "*i32", "rest_counts_ptr": "*i16"}
    sizes = {"STRIDE": 1024, "STEP": step, "ALIGN": 512, "RUN": lane.RUN_BYTES}
    ship = compile_kernel(lane.ship_kernel, kinds, sizes, capability, num_warps=lane.NUM_WARPS)
    fetched = {"lane_ptr": values, "place_ptr": "*i64", "values_ptr": values}
    fetch = compile_kernel(
        lane.unship_kernel, fetched, {"PIECE": lane.PIECE}, capability, num_warps=lane.PIECE_WARPS
    )  # fmt: skip
    sizes = {"GROUP": lane.GROUP, "ROUND": lane.ROUND, "STEP": step}
    index = compile_kernel(lane.index_kernel, counts, sizes, capability, num_warps=lane.COUNTING_WARPS)
    assert ship.stack_bytes == fetch.stack_bytes == index.stack_bytes == 0
    assert ship.registers * lane.NUM_WARPS * 32 <= 65536 and index.instructions <= 640
    # a warp writes whole lines of 128 bytes at once
    assert ship.stores_128 >= 3
