"""A choice as sums against the simulator: bytes, seconds and stalls of choices and of steps between them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.optimal.attempt import Attempt
from gistkit.planning.policies.optimal.stalls import stalled
from gistkit.planning.simulate.simulator import Simulator
from tests.support.step_graphs import chain, step_graphs

LINKED = replace(hardware("cpu"), d2h_gbps=6.0, h2d_gbps=8.0, both_gbps=14.0, launch_s=1e-7)
SHARED = replace(LINKED, both_gbps=9.0)
SLOW = replace(LINKED, both_gbps=5.0)


def test_stalls_by_hand():
    tasks = np.ones(6)
    assert stalled(tasks, [], 1.0) == 0.0
    assert stalled(tasks, [(1, 3, 0, 2.0), (3, 4, 1, 1.0)], 1.0) == 0.0
    assert stalled(tasks, [(1, 3, 0, 2.5)], 1.0) == 0.5
    assert stalled(tasks, [(2, 2, 1, 3.0)], 1.0) == 3.0
    # Behind each other: 1 to 2.5 and 2.5 to 4, the second wanted at 3.
    assert stalled(tasks, [(1, 4, 0, 1.5), (1, 3, 0, 1.5)], 1.0) == 0.0
    assert stalled(tasks, [(1, 2, 0, 1.5), (1, 3, 0, 1.5)], 1.0) == pytest.approx(1.0)
    # Both directions from 1 on at three quarters: the shorter ends at 1 + 1.5 / 0.75 = 3, the other half a second on.
    assert stalled(tasks, [(1, 3, 0, 1.5), (1, 3, 1, 2.0)], 0.75) == pytest.approx(0.5)
    assert stalled(tasks, [(1, 2, 0, 9.0), (1, 3, 0, 9.0)], 1.0, most_s=1.0) > 1.0


@pytest.mark.parametrize("device", [LINKED, SHARED, SLOW], ids=["link", "shared", "slow"])
@settings(deadline=None, max_examples=30, derandomize=True)
@given(data=st.data())
def test_sums_are_what_the_simulator_says(device, data):
    """A choice, and steps from it one after the other: as if each were simulated."""
    graph = data.draw(st.sampled_from((chain(5, 8, 32, 4), None)))
    graph = data.draw(step_graphs(8)) if graph is None else graph
    costs = cost_table(graph, device)
    attempt = Attempt(graph, costs, Simulator(graph, costs), "reassociated", None, algorithms=False)
    search, problem = attempt.search, attempt.problem
    now = search.standing(search.fastest())
    for _ in range(data.draw(st.integers(1, 12))):
        group = data.draw(st.integers(0, len(problem.groups) - 1))
        step = now.step(group, data.draw(st.integers(0, len(problem.groups[group]) - 1)))
        if step is None:
            continue
        told = now.level_after(step), now.seconds_after(step), now.compute_s + step.more_s
        now.take(step)
        assert (now.level == told[0]).all() and now.seconds() == pytest.approx(told[1], rel=1e-12)
        assert now.compute_s == pytest.approx(told[2], rel=1e-12)
        assert problem.allowed(now.taken)
        anew = search.standing(now.taken)
        assert (anew.level == now.level).all() and anew.seconds() == pytest.approx(now.seconds(), rel=1e-12)
        seconds, peak = attempt.clock(now.taken)
        assert (now.level.max(), now.seconds()) == (peak, pytest.approx(seconds, rel=1e-9))
