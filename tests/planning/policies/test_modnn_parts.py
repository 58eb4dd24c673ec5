"""moDNN's equations, Fig. 3's delay and Fig. 4's search on cases that are computed by hand."""

import pytest
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import gistkit
from gistkit.planning.cost.part_algorithms import by_part, of_part
from gistkit.planning.policies.modnn.bounds import least_by_class, lower_bound, next_size, sub_batch
from gistkit.planning.policies.modnn.lives import PAPER, PLAN, Life
from gistkit.planning.policies.modnn.lives import lives as lives_of
from gistkit.planning.policies.modnn.offload import Leaving, best_scheme, offload_delay_s
from gistkit.planning.policies.modnn.result import gain_s, start_prefetch_now
from gistkit.planning.policies.modnn.state import Places
from gistkit.planning.simulate.memory_map import MemoryMap
from tests.support import modnn_cases as hand
from tests.support.planning_cases import T, X, net
from tests.support.step_graphs import chain, forked, pooled


def figure_4():
    """Six segments as in Fig. 4: blocks 1 to 6 of 2, 2, 1, 2, 3 and 1 bytes. Block 3 is too small to reach 4 before the
    pinned block 4 comes."""
    memory = MemoryMap(11)
    for block, nbytes in ((1, 2), (2, 2), (3, 1), (4, 2), (5, 3), (6, 1)):
        assert memory.allocate(block, nbytes) is not None
    return memory


class Delays:
    """Delays that are given by the run, with no bound below them but zero."""

    def __init__(self, delay_s):
        self.delay_s = delay_s

    def least_s(self, runs):
        return [0.0 for _ in runs]


def scheme(delay_s, need=lambda block: 0, unsaved=lambda block: 0, nbytes=4, may_leave=lambda b: b != 4):
    """The blocks of the scheme that is chosen in Fig. 4's memory."""
    found = best_scheme(figure_4().runs(nbytes, may_leave), Delays(delay_s), need, unsaved)
    return None if found is None else (found.blocks, found.delay_s)


@pytest.mark.parametrize(("slow", "taken"), [({1, 2}, (5, 6)), ({5, 6}, (1, 2))])
def test_figure_4_takes_the_run_with_the_lower_delay(slow, taken):
    # Two runs, around the block that may not leave; from block 2 it is 2 + 1 = 3 bytes, then the pinned block.
    assert list(figure_4().runs(4, lambda b: b != 4)) == [(1, 2), (5, 6)]
    assert scheme(lambda run: 1.0 if slow & set(run) else 0.5) == (taken, 0.5)


def test_of_runs_of_equal_delay_the_one_needed_last_goes_then_the_one_that_moves_least_then_the_lowest():
    needs = {1: 9, 2: 3, 3: 0, 5: 5, 6: 8}  # the run (1, 2) is needed at 3, (5, 6) at 5
    assert scheme(lambda run: 0.0, needs.__getitem__, lambda block: block) == ((5, 6), 0.0)
    needs[2] = 5
    assert scheme(lambda run: 0.0, needs.__getitem__, lambda block: 10 - block) == ((5, 6), 0.0)
    assert scheme(lambda run: 0.0, needs.__getitem__, lambda block: block) == ((1, 2), 0.0)
    assert scheme(lambda run: 0.0) == ((1, 2), 0.0)


def test_no_run_is_no_scheme():
    assert scheme(lambda run: 0.0, may_leave=lambda b: b % 2 == 0) is None
    assert scheme(lambda run: 0.0, nbytes=12, may_leave=lambda b: True) is None


KINDS = st.sampled_from(("free", "block", "block", "block", "pinned"))
SEGMENTS = st.lists(st.tuples(st.integers(1, 9), KINDS), min_size=6, max_size=14)


def laid_out(segments):
    """A map of these segments; blocks are named by their place."""
    memory = MemoryMap(sum(n for n, _ in segments))
    for name, (nbytes, _) in enumerate(segments):
        memory.allocate(name, nbytes)
    for name, (_, kind) in enumerate(segments):
        if kind == "free":
            memory.free(name)
    return memory, {name for name, (_, kind) in enumerate(segments) if kind == "block"}


@settings(deadline=None, max_examples=40, derandomize=True)
@given(SEGMENTS, st.integers(1, 9), st.data())
def test_the_scheme_is_that_of_looking_at_every_run(segments, more, data):
    """Sums and minima over a window of runs against each run by itself."""
    memory, movable = laid_out(segments)
    drawn = st.fixed_dictionaries({b: st.integers(0, 4) for b in movable})
    need, ready = data.draw(drawn), data.draw(drawn)
    saved = data.draw(st.sets(st.sampled_from(sorted(movable)))) if movable else set()
    nbytes = memory.largest_free_bytes + more
    runs, listed = memory.runs(nbytes, movable.__contains__), every_run(memory, nbytes, movable)
    assert list(runs) == listed
    size = {b: segments[b][0] for b in movable}
    leaving = Leaving(saved, lambda b: 0.1 * size[b], ready, link_free_s=1.5, now_s=3.0)
    assert all(least <= leaving.delay_s(run) for least, run in zip(leaving.least_s(runs), listed, strict=True))
    unsaved = {b: 0 if b in saved else n for b, n in size.items()}

    def rank(run):
        return leaving.delay_s(run), -min(need[b] for b in run), sum(unsaved[b] for b in run)

    found = best_scheme(runs, leaving, need.__getitem__, unsaved.__getitem__)
    assert (found and found.blocks) == min(listed, key=rank, default=None)


def every_run(memory, nbytes, movable):
    """Fig. 4's runs as it draws them: from each segment on until there is room."""
    found, segments = [], list(memory.segments())
    for first in range(len(segments)):
        total, run = 0, []
        for _, size, key in segments[first:]:
            if total >= nbytes or (key is not None and key not in movable):
                break
            total, run = total + size, [*run, *([key] if key is not None else [])]
        if total >= nbytes and tuple(run) not in found:
            found.append(tuple(run))
    return found


def test_a_copy_of_a_map_is_the_same_map_and_another():
    memory = figure_4()
    memory.free(2)
    memory.free(6)
    copied = memory.copy()
    assert list(copied.segments()) == list(memory.segments())
    copied.free(1)
    copied.defragment()
    assert 1 in memory and memory.largest_free_bytes == 2 and copied.largest_free_bytes == 5


def test_figure_3_delay():
    # (a) made at 2 s, 4 s of transfer, next task at 5 s: it waits until 6 s. (b) made at 1 s: over by then.
    assert offload_delay_s([(2.0, 4.0)], 0.0, 5.0) == 1.0
    assert offload_delay_s([(1.0, 4.0)], 0.0, 5.0) == 0.0
    # The stream is busy until 3 s; two transfers run one after the other, the one that is ready first first.
    assert offload_delay_s([(1.0, 4.0)], 3.0, 5.0) == 2.0
    assert offload_delay_s([(4.0, 1.0), (0.0, 1.0)], 0.0, 5.0) == 0.0
    assert offload_delay_s([], 9.0, 5.0) == 0.0


def test_equation_4_prefetch_criterion():
    # T = 10, the task takes 2, transfers 3 and 4: fetched after it, the data are there at 19.
    assert start_prefetch_now(10.0, 2.0, [3.0, 4.0], 18.9)
    assert not start_prefetch_now(10.0, 2.0, [3.0, 4.0], 19.0)
    assert not start_prefetch_now(10.0, 2.0, [3.0, 4.0], 30.0)


def test_equation_5_gain():
    assert gain_s(10.0, 4.0, 2.0, 3.0) == 1.0
    assert gain_s(10.0, 10.0, 0.0, 0.0) == 0.0


def test_equation_1_counts_inputs_output_and_workspace():
    alive = hand.lives(3, hand.life(0, 10, 0, 1), hand.life(1, 5, 1, 2), resident=100, transient=[0, 7, 0])
    assert [alive.demand_bytes(t, 3) for t in range(3)] == [13, 25, 8]


def test_equation_2_takes_the_largest_task_without_workspace():
    alive = hand.lives(3, hand.life(0, 10, 0, 1), hand.life(1, 5, 1, 2), resident=100)
    table = hand.costs([1, 1, 1], {1: (("fast", 0.5, 1000), ("implicit_gemm", 1.0, 0))})
    bound = lower_bound(hand.part(alive, table))
    assert (bound.task, bound.nbytes) == (1, 115)


def growing(workspace=0, resident=100, sample=10):
    """at(parts) of a batch of 16: one task that needs ``sample`` bytes a sample, and a workspace at its fastest."""

    def at(parts):
        size = -(-16 // parts)
        alive = hand.lives(1, hand.life(0, sample * size, 0), resident=resident)
        table = hand.costs([1], {0: (("implicit_gemm", 1.0, 0), ("fast", 0.5, workspace))})
        return hand.part(alive, table, size, parts)

    return at


def test_equation_3_converges():
    # 16 samples need 160 of 60 free bytes: b = floor(16 * 60 / 160) = 6, which is 3 parts of at most 6; 6 stays.
    found = sub_batch(growing(), 16, 160)
    assert (found.sizes, found.part.parts, found.part.size) == ((16, 6), 3, 6)


def test_equation_3_leaves_room_for_the_workspace_of_the_fastest_algorithm():
    # b = floor(16 * 60 / 190) = 5, 4 parts of 4; 40 + 30 of 60: b = 3, 6 parts of 3; 30 + 30 of 60: 3 stays.
    found = sub_batch(growing(workspace=30), 16, 160)
    assert (found.sizes, found.part.size, found.part.parts) == ((16, 4, 3), 3, 6)
    assert next_size(growing(workspace=30)(4), 16, 160) == 3


def test_equation_3_takes_the_whole_batch_where_it_fits_and_one_sample_where_it_must():
    assert sub_batch(growing(), 16, 1000).sizes == (16,)
    # 10 bytes are free, the workspace never fits: the size goes down to 1, whose baseline algorithm fits.
    assert sub_batch(growing(workspace=500), 16, 110).part.size == 1


def test_equation_3_in_a_cycle_takes_its_largest_size_that_fits():
    # Workspace at size 16 only: 16 -> 4 -> 16 -> ...; the baseline fits at 16.
    def at(parts):
        size = -(-16 // parts)
        alive = hand.lives(1, hand.life(0, 10 * size, 0))
        table = hand.costs([1], {0: (("implicit_gemm", 1.0, 0), ("fast", 0.5, 480 if size == 16 else 0))})
        return hand.part(alive, table, size, parts)

    found = sub_batch(at, 16, 160)
    assert found.part.size == 16 and set(found.sizes) == {16, 4}


def test_the_whole_batch_is_taken_where_no_smaller_size_fits():
    # Its gradients are not summed: 160 of 165 bytes. In parts they are 160 bytes by themselves.
    def at(parts):
        alive = hand.lives(1, hand.life(0, 10 * -(-16 // parts), 0), resident=160 if parts > 1 else 0)
        table = hand.costs([1], {0: (("implicit_gemm", 1.0, 0), ("fast", 0.5, 30))})
        return hand.part(alive, table, -(-16 // parts), parts)

    assert least_by_class(at, 16) == {"bitwise": 160, "reassociated": 160}
    found = sub_batch(at, 16, 165)
    assert (found.part.parts, found.sizes[0], found.sizes[-1]) == (1, 16, 16) and len(found.sizes) > 1


def test_what_is_pinned_never_leaves():
    # Block 0, a gradient, is written by tasks 0 and 1 and used no more; block 1 waits for task 3.
    alive = hand.lives(4, Life(0, 5, ((0, 4),), (0, 1), False, pinned=True), hand.life(1, 5, 0, 3))
    assert alive.needed == ((0, 1), (0,), (), (1,))
    assert [alive.demand_bytes(t) for t in range(4)] == [10, 5, 5, 10]
    places = Places(alive, MemoryMap(20))
    for task, made in enumerate([(0, 1), ()]):
        for block in made:
            places.enter(block, 5)
        places.retire(task, made)
    assert places.here == {0, 1} and places.may_leave(2, -1) <= {1}


def test_sub_batch_below_the_bound_is_an_error():
    with pytest.raises(ValueError, match=r"at least eq. \(2\)'s bound, got 105"):
        sub_batch(growing(), 16, 105)


def test_lives_of_a_chain_under_both_rules():
    # conv0 relu1 conv2 relu3 mean4 | mean5 relu6 conv2.weight7 conv2.input8 relu9 conv0.weight10
    graph = chain(layers=2)
    block = next(b for b in graph.blocks if b.first == 1)
    plan, paper = lives_of(graph, PLAN), lives_of(graph, PAPER)
    assert plan.lives[block.id].stays == ((1, 2), (7, 9))
    assert paper.lives[block.id].stays == ((1, 1), (2, 2), (7, 7), (9, 9))
    always = sum(b.nbytes for b in graph.blocks if b.kind in ("weight", "buffer", "input"))
    gradients = [b for b in graph.blocks if b.kind == "weight_gradient"]
    assert paper.resident_bytes == lives_of(graph, PLAN, accumulates=True).resident_bytes
    assert paper.resident_bytes == always + sum(b.nbytes for b in gradients)
    # Of a whole batch each is there from the task on that makes it, and never leaves.
    assert plan.resident_bytes == always and plan.pinned == {b.id for b in gradients}
    assert all(plan.lives[b.id].stays == ((b.first, len(graph.tasks)),) for b in gradients)


def test_gradient_maps_leave_under_the_papers_rule_only():
    graph = forked()
    gradients = {b.id for b in graph.blocks if b.kind == "gradient"}
    plan, paper = lives_of(graph, PLAN), lives_of(graph, PAPER)
    assert all(len(plan.lives[b].stays) == 1 for b in gradients)
    assert any(len(paper.lives[b].stays) > 1 for b in gradients)


def test_what_the_runtime_keeps_small_stays_and_what_runs_in_place_ends_early():
    graph = pooled()
    index = next(b for b in graph.blocks if b.dtype == "int64")
    made = lives_of(graph, PLAN, forms={index.storage: 17}).lives[index.id]
    assert (made.nbytes, made.stays) == (17, ((index.first, index.uses[-1].task),))
    gone = lives_of(graph, PLAN, forms={index.storage: 0}).lives[index.id]
    assert gone.stays == ((index.first, index.last),)
    graph = chain(layers=2)
    first = next(b for b in graph.blocks if b.first == 0 and b.kind == "activation")
    assert lives_of(graph, PLAN).lives[first.id].stays == ((0, 1),)
    assert lives_of(graph, PLAN, inplace=[1]).lives[first.id].stays == ((0, 0),)


def test_without_a_link_nothing_leaves():
    assert all(len(one.stays) == 1 for one in lives_of(forked(), PAPER, link=False).lives.values())


def test_algorithms_by_part_in_one_text():
    assert by_part({"forward": "fft", "weight": "fft"}) == "fft"
    text = by_part({"forward": "fft", "weight": "gemm"})
    assert (of_part(text, "forward"), of_part(text, "weight"), of_part(text, "input")) == ("fft", "gemm", "")
    assert of_part("fft", "weight") == "fft" and of_part("", "weight") == ""


def test_what_operators_keep_for_themselves_never_leaves():
    graph = gistkit.capture(net(batch_norm=True), (X,), backward=True, loss_fn=F.cross_entropy, targets=(T,))
    inside, vectors = set(), set()
    for call in graph.calls:
        if call.op == "batch_norm":
            inside.add(graph.values[call.operands[0]].storage)
            vectors |= {s.storage for s in call.saves if graph.storages[s.storage].producer == call.index}
    stays = {
        rule: {graph.blocks[b].storage: one.stays for b, one in lives_of(graph, rule).lives.items()}
        for rule in (PLAN, PAPER)
    }
    assert len(vectors) == 6
    assert all(len(stays[PLAN][s]) == 1 < len(stays[PAPER][s]) for s in vectors)
    assert all(len(stays[PLAN][s]) == 2 for s in inside)
