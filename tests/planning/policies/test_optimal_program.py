"""The program of `optimal` by its parts: rows of memory, the link's bound, conflicts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.forms.options import options
from gistkit.planning.policies.optimal.attempt import Attempt
from gistkit.planning.policies.optimal.program import TOLERANCE, Cuts, Program
from gistkit.planning.policies.optimal.rows import worst_tasks
from gistkit.planning.simulate.simulator import Simulator
from tests.support.step_graphs import chain, forked, step_graphs

LINKED = replace(hardware("cpu"), d2h_gbps=6.0, h2d_gbps=8.0, both_gbps=14.0, launch_s=1e-7)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(data=st.data())
def test_one_of_the_worst_tasks_is_the_worst(data):
    base = np.array(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=12)), dtype=np.int64)
    ends = st.tuples(st.integers(0, len(base) - 1), st.integers(0, len(base) - 1))
    spans = data.draw(st.lists(st.tuples(ends, st.integers(-3, 5)), max_size=5))
    intervals = [(min(span), max(span), nbytes) for span, nbytes in spans]
    kept = worst_tasks(base, intervals)
    for mask in range(2 ** len(intervals)):
        level = base.copy()
        for i, (first, last, nbytes) in enumerate(intervals):
            if mask >> i & 1:
                level[first : last + 1] += nbytes
        assert level[kept].max() == level.max()


@settings(deadline=None, max_examples=15, derandomize=True)
@given(data=st.data())
def test_the_link_is_bounded_from_below(data):
    """Any choice fixed: the program's figure is no more than the simulated step; exact where a transfer is hurried."""
    graph = data.draw(step_graphs(6))
    costs = cost_table(graph, LINKED)
    attempt = Attempt(graph, costs, Simulator(graph, costs), "bitwise", None, algorithms=False)
    taken = [data.draw(st.integers(0, len(group) - 1)) for group in attempt.problem.groups]
    if not attempt.problem.allowed(taken):
        return
    seconds = attempt.clock(taken)[0]
    solved = Program(attempt.problem).least_time(None, Cuts(), 10, fixed=taken)
    assert solved.taken == tuple(taken)
    assert solved.bound <= seconds * (1 + 1e-9)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(data=st.data())
def test_no_choice_is_below_the_floor(data):
    graph = data.draw(step_graphs(8))
    costs = cost_table(graph, LINKED)
    fidelity = data.draw(st.sampled_from(("bitwise", "reassociated")))
    attempt = Attempt(graph, costs, Simulator(graph, costs), fidelity, None, algorithms=False)
    problem = attempt.problem
    taken = [data.draw(st.integers(0, len(group) - 1)) for group in problem.groups]
    seconds = float(problem.base_s.sum()) + sum(part.seconds for part in problem.parts(taken))
    assert 0 < problem.floor_s <= seconds * (1 + 1e-12)


def test_a_hurried_transfer_stalls_for_all_of_its_seconds():
    graph = chain(3, 8, 32, 4)
    costs = cost_table(graph, LINKED)
    listed = options(graph, costs)
    block = next(b for b in graph.blocks if b.storage >= 0 and len(listed.get(b.storage, ())) > 4 and b.uses)
    at_use = [d for d in listed[block.storage] if d.place == "host" and d.prefetch == block.uses[0].task]
    found = {s: at_use[:1] if s == block.storage else d[:1] for s, d in listed.items()}
    attempt = Attempt(graph, costs, Simulator(graph, costs), "bitwise", None, found=found, algorithms=False)
    taken = [0] * len(attempt.problem.groups)
    solved = Program(attempt.problem).least_time(None, Cuts(), 10)
    step_s = attempt.clock(taken)[0]
    # The fluid knows no queue, but here is one transfer each way: the bound is the step, to the program's tolerance.
    assert solved.bound == pytest.approx(step_s, rel=2 * TOLERANCE)
    back = next(t for m in attempt.problem.groups for t in m[0].part.transfers if t.direction == "h2d")
    assert step_s - float(attempt.problem.base_s.sum()) >= costs.h2d_s(back.nbytes) - 1e-12


def test_conflicts_are_rows():
    graph = forked(2, 8, 32, 4)
    costs = cost_table(graph, LINKED)
    attempt = Attempt(graph, costs, Simulator(graph, costs), "bitwise", None, algorithms=False)
    conflict = attempt.problem.conflicts[0]
    fixed = [-1] * len(attempt.problem.groups)
    for group, move in conflict:
        fixed[group] = move
    program = Program(attempt.problem)
    assert program.least_time(None, Cuts(), 10, fixed=fixed).bound == np.inf
    fixed[conflict[0][0]] = -1
    solved = program.least_time(None, Cuts(), 10, fixed=fixed)
    assert solved.taken is not None and attempt.problem.allowed(solved.taken)
