"""moDNN's equations, memory map, Fig. 3's delay and Fig. 4's search, and when data stay, on cases computed by hand."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.papers.modnn_devices import paper_tdfg as paper_rule
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.modnn.memory import Memory, MemoryMap, offload_delay_s
from gistkit.planning.policies.modnn.sub_batch import lower_bound, next_size, parts_of, sub_batch
from tests.support import modnn_cases as hand
from tests.support.modnn_cases import FAST_LINK
from tests.support.step_graphs import chain


def figure_4():
    """Six segments as in Fig. 4: blocks 1 to 6 of 2, 2, 1, 2, 3 and 1 bytes. Block 3 is too small to reach 4 before the
    pinned block 4 comes."""
    memory = MemoryMap(11)
    for block, nbytes in ((1, 2), (2, 2), (3, 1), (4, 2), (5, 3), (6, 1)):
        memory.allocate(block, nbytes)
    return memory


def scheme(delay_s):
    """The data that leave Fig. 4's memory for 4 bytes; block 4 is pinned."""
    sizes = {1: 2, 2: 2, 3: 1, 4: 2, 5: 3, 6: 1}
    tdfg = hand.part([1], *(hand.data(b, sizes.get(b, 0), 0) for b in range(7))).tdfg
    return Memory(tdfg, figure_4(), {b: 1 for b in sizes if b != 4}, set()).scheme(4, 0, delay_s=delay_s)


@pytest.mark.parametrize(("slow", "taken"), [({1, 2}, (5, 6)), ({5, 6}, (1, 2))])
def test_figure_4_takes_the_run_with_the_lower_delay(slow, taken):
    # Two runs, around the block that may not leave; from block 2 it is 2 + 1 = 3 bytes, then the pinned block.
    assert list(figure_4().runs(4, lambda b: b != 4)) == [(1, 2), (5, 6)]
    assert scheme(lambda run: 1.0 if slow & set(run) else 0.5) == taken


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=30))
def test_memory_map_is_a_partition(moves):
    memory = MemoryMap(24)
    for key, nbytes in moves:
        twin, before = memory.copy(), memory.segments()
        if key in memory:
            memory.free(key)
        elif key == 5:
            memory.defragment()
        elif memory.fits(nbytes):
            memory.allocate(key, nbytes)
        assert twin.segments() == before
        found = [s for s in memory.segments() if s[1]]
        assert [start for start, _, _ in found] == [sum(n for _, n, _ in found[:i]) for i in range(len(found))]
        assert sum(n for _, n, _ in found) == 24
        assert sum(n for _, n, key in found if key is not None) == memory.used_bytes
        assert not any(a[2] is None and b[2] is None for a, b in pairwise(found))


def test_figure_3_delay():
    # (a) made at 2 s, 4 s of transfer, next task at 5 s: it waits until 6 s. (b) made at 1 s: over by then.
    assert offload_delay_s([(2.0, 4.0)], 0.0, 5.0) == 1.0
    assert offload_delay_s([(1.0, 4.0)], 0.0, 5.0) == 0.0
    # The stream is busy until 3 s; two transfers run one after the other, the one that is ready first first.
    assert offload_delay_s([(1.0, 4.0)], 3.0, 5.0) == 2.0
    assert offload_delay_s([(4.0, 1.0), (0.0, 1.0)], 0.0, 5.0) == 0.0
    assert offload_delay_s([], 9.0, 5.0) == 0.0


def test_equations_1_and_2():
    found = hand.data(0, 10, 0, 1), hand.data(1, 5, 1, 2)
    assert hand.part([1, 1, 1], *found, transient=[0, 7, 0]).tdfg.demand_bytes == (10, 22, 5)
    choice = {1: (("fast", 0.5, 1000), ("implicit_gemm", 1.0, 0))}
    assert lower_bound(hand.part([1, 1, 1], *found, resident=100, algorithms=choice)) == 115


def growing(parts):
    """A part of a batch of 16: one task that needs 10 bytes a sample."""
    size, choice = -(-16 // parts), {0: (("implicit_gemm", 1.0, 0), ("fast", 0.5, 0))}
    return hand.part([1], hand.data(0, 10 * size, 0), algorithms=choice, resident=100, size=size, parts=parts)


def test_equation_3_converges():
    # 16 samples need 160 of 60 free bytes: b = floor(16 * 60 / 160) = 6, which is 3 parts of at most 6; 6 stays.
    assert next_size(growing(1), 160) == 6
    found = sub_batch(growing, 16, 160)
    assert (found.parts, found.size) == (3, 6)


def stays(graph, rule, parts=1):
    """By block its stays."""
    part = parts_of(graph, cost_table(graph, FAST_LINK), rule)(parts)
    return {d.block: d.stays for d in part.tdfg.data}, part.tdfg


def test_stays_of_a_chain_under_both_rules():
    # conv0 relu1 conv2 relu3 mean4 | mean5 relu6 conv2.weight7 conv2.input8 relu9 conv0.weight10
    graph = chain(layers=2)
    block = next(b for b in graph.blocks if b.first == 1)
    (plan, plan_tdfg), (paper, paper_tdfg) = stays(graph, None), stays(graph, paper_rule)
    assert plan[block.id] == ((1, 2), (7, 9))
    assert paper[block.id] == ((1, 1), (2, 2), (7, 7), (9, 9))
    always = sum(b.nbytes for b in graph.blocks if b.kind in ("weight", "buffer", "input"))
    gradients = [b for b in graph.blocks if b.kind == "weight_gradient"]
    summed = always + sum(b.nbytes for b in gradients)
    assert paper_tdfg.resident_bytes == summed == stays(graph, None, parts=2)[1].resident_bytes
    # Of a whole batch each is there from the task on that makes it, and never leaves.
    assert plan_tdfg.resident_bytes == always
    assert all(plan[b.id] == ((b.first, len(graph.tasks)),) for b in gradients)
