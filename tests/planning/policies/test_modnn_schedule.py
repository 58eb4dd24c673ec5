"""Algorithm 1 of moDNN, part by part, on steps that are scheduled by hand: one second moves S bytes."""

import pytest

from gistkit.planning.policies.modnn.modnn import Absence, Schedule
from tests.support import modnn_cases as hand
from tests.support.modnn_cases import SECOND_BYTES as S

A, B, C, D = 0, 1, 2, 3
FAST = {2: (("implicit_gemm", 2.0, 0), ("fast", 1.5, S))}


def run(memory, seconds, *blocks, algorithms=None, transient=None):
    """The schedule of hand-made blocks in ``memory`` times S bytes."""
    return Schedule(hand.part(seconds, *blocks, algorithms=algorithms, transient=transient), int(memory * S))


def moves(found):
    return [(m.block, m.direction, m.task, m.start_s, m.finish_s) for m in found.moves]


def delays(found):
    """How long each task waits for transfers."""
    finished = [0.0, *(r.finish_s for r in found.runs)]
    return [r.start_s - before for r, before in zip(found.runs, finished, strict=False)]


def algorithms(found):
    return [r.algorithm for r in found.runs]


def test_everything_fits_nothing_moves():
    found = run(2, [1, 1, 1], hand.data(A, S, 0, 2), hand.data(B, S, 1))
    assert found.moves == [] and not found.absences and found.step_s == 3.0
    assert [r.memory_bytes for r in found.runs] == [S, 2 * S, S]  # B is dead after task 1


def test_a_block_leaves_unseen_and_comes_back_just_in_time():
    # A is written by 1 s and read by 2 s. At 2 s it has to go for B: its transfer ran from 1 s to 2 s (Fig. 3b). It is
    # needed at 5 s, so by eq. (4) it is fetched before task 4, not before task 3: 3 + 1 + 1 is not above 5.
    found = run(1.5, [1] * 6, hand.data(A, S, 0, 1, 5), hand.data(B, S, 2, 3))
    assert moves(found) == [(A, "d2h", 2, 1.0, 2.0), (A, "h2d", 4, 4.0, 5.0)]
    assert tuple(found.absences.values()) == (Absence(A, 2, 4),)
    assert delays(found) == [0.0] * 6 and found.step_s == 6.0


def test_an_input_that_nobody_prefetched_is_loaded_on_demand():
    # B lies there until task 2, so A finds no room before task 3 needs it: lines 3-8.
    found = run(1.5, [1] * 4, hand.data(A, S, 0, 1, 3), hand.data(B, S, 2))
    assert moves(found)[1] == (A, "h2d", 3, 3.0, 4.0)
    assert delays(found) == [0.0, 0.0, 0.0, 1.0] and found.step_s == 5.0


def test_rule_b_a_block_that_was_not_used_since_it_was_made_does_not_leave():
    # Nobody has read A when B needs room: no scheme, so the memory is defragmented (A leaves all the same).
    found = run(1.5, [1] * 4, hand.data(A, S, 0, 3), hand.data(B, S, 1))
    assert found.defragmented == [1]
    assert moves(found)[0] == (A, "d2h", 1, 1.0, 2.0) and delays(found)[1] == 1.0
    # A block that no forward task reads again counts as used: it leaves by the search.
    found = run(1.5, [1] * 4, hand.data(A, S, 0, 3, fresh=False), hand.data(B, S, 1))
    assert found.defragmented == [] and moves(found)[0] == (A, "d2h", 1, 1.0, 2.0)


def test_the_second_offload_of_a_block_only_frees_it():
    blocks = (hand.data(A, S, 0, 1, 4, 8), hand.data(B, S, 2), hand.data(C, S, 6))
    found = run(1.5, [1] * 9, *blocks)
    assert [m[:3] for m in moves(found)] == [(A, "d2h", 2), (A, "h2d", 3), (A, "h2d", 7)]
    assert tuple(found.absences.values()) == (Absence(A, 2, 3), Absence(A, 6, 7))


def test_no_run_in_fragmented_memory_means_defragmentation():
    # A and C have S free between them where B was, 2 S are wanted: C, not used since it was made, leaves all the same.
    blocks = (hand.data(A, S, 0, 3), hand.data(B, S, 1), hand.data(C, S, 1, 4), hand.data(D, 2 * S, 3))
    found = run(4, [1] * 5, *blocks)
    assert found.defragmented == [3] and found.moves[0][:4] == (C, S, "d2h", 3)
    assert delays(found)[3] == 0.0  # C's transfer ran beside task 2
    # Where C has to stay it is moved to A's side: S bytes read and written at 1000 GB/s.
    stay = [hand.data(A, S, (0, 3)), blocks[1], hand.data(C, S, (1, 4)), blocks[3]]
    found = run(4, [1] * 5, *stay)
    assert found.defragmented == [3] and found.moves == []
    assert delays(found)[3] == pytest.approx(2 * S / 1e12)


def test_the_fastest_algorithm_is_taken_where_its_workspace_is_free():
    found = run(3, [1] * 4, hand.data(A, S, 0, 1, 3), hand.data(B, S, 2), algorithms=FAST)
    assert algorithms(found)[2] == "fast" and found.runs[2].memory_bytes == 3 * S


def test_an_algorithm_whose_workspace_delays_the_task_is_left():
    # A is written at 1 s; at 1.25 s its offload for the workspace costs 0.75 s of delay, the algorithm gains 0.5 s.
    blocks = (hand.data(A, S, 0, 1, 4), hand.data(B, S, 2))
    slow = run(2.5, [1, 0.25, 9, 1, 1], *blocks, algorithms=FAST)
    assert algorithms(slow)[2] == "implicit_gemm" and slow.moves == []
    # After a longer task 1 the transfer is over before task 2: no delay, the gain is 0.5 s.
    fast = run(2.5, [1, 1, 9, 1, 1], *blocks, algorithms=FAST)
    assert algorithms(fast)[2] == "fast" and moves(fast)[0] == (A, "d2h", 2, 1.0, 2.0)
    # Eq. (5): 0.5 s saved less 0.5 s of delay is what the baseline gains, which moves nothing.
    equal = run(2.5, [1, 0.5, 9, 1, 1], *blocks, algorithms=FAST)
    assert algorithms(equal)[2] == "implicit_gemm" and equal.moves == []


@pytest.mark.parametrize(("fast_s", "taken"), [(1.5, "implicit_gemm"), (0.5, "fast")])
def test_an_algorithm_that_holds_up_a_prefetch_pays_for_it(fast_s, taken):
    # B made A leave; before task 3 there is room for A's return (1 s, due at task 4) or for the workspace, which gains
    # 0.5 s or 1.5 s.
    choice = {3: (("implicit_gemm", 2.0, 0), ("fast", fast_s, S))}
    found = run(1.5, [1, 1, 1, 9, 1], hand.data(A, S, 0, 1, 4), hand.data(B, S, 2), algorithms=choice)
    assert algorithms(found)[3] == taken
    assert next(m for m in found.moves if m.direction == "h2d").task == (3 if taken == "implicit_gemm" else 4)


def test_a_prefetch_that_would_be_lost_again_is_not_begun():
    # A (3 s to fetch, due at task 5) would have to be fetched from task 3 on; but task 4 makes C, for which there is no
    # room beside A: A comes after it.
    blocks = (hand.data(A, 3 * S, 0, 1, 5), hand.data(B, S, 2), hand.data(C, S, 4))
    found = run(3.5, [1, 3, 1, 1, 1, 1], *blocks)
    assert [m[:3] for m in moves(found)] == [(A, "d2h", 2), (A, "h2d", 5)]
    assert found.defragmented == []


def test_one_transfer_spans_several_tasks():
    found = run(4.5, [1, 5, *[1] * 7], hand.data(A, 4 * S, 0, 1, 8), hand.data(B, 4 * S, 2))
    # d2h from 1 s to 5 s beside task 1 (1 s to 6 s); B dies at 7 s; 4 s of transfer begin at 8 s at the latest.
    assert moves(found) == [(A, "d2h", 2, 1.0, 5.0), (A, "h2d", 4, 8.0, 12.0)]
    assert delays(found) == [0.0] * 9
