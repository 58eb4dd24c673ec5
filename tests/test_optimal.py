"""`optimal` against brute force: every combination of decisions through the simulator."""

from dataclasses import replace
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.errors import BudgetError, PlanError
from gistkit.plan.cost import cost_table
from gistkit.plan.hardware import hardware
from gistkit.plan.plan import Plan
from gistkit.plan.policies.choices import call_choices
from gistkit.plan.policies.optimal import minimise_peak, optimal
from gistkit.plan.policies.optimal_attempt import Attempt
from gistkit.plan.policies.options import options
from gistkit.plan.policies.reading import Reading
from gistkit.plan.simulate import Simulator, simulate
from tests.step_graphs import chain, forked, pooled, step_graphs

COMBINATIONS = 400
CPU = hardware("cpu")
# Slow enough that a transfer takes as long as several layers, fast enough that some of it is hidden.
LINKED = replace(CPU, d2h_gbps=6.0, h2d_gbps=8.0, both_gbps=14.0, launch_s=1e-7)
SHARED = replace(LINKED, both_gbps=9.0)
CUDA = replace(LINKED, async_counts=True, codec_slowdown=1.0)
FIXED = {"algorithms": False, "time_limit_s": 20}
# HiGHS meets its rows to 1e-6 of the unit; the program's bound is lowered by 1e-6 of the plain step for it, and two such
# differences are taken for none (optimal_refine.Refinement._meets).
ROOM = 2e-6 + 1e-6


def brute_force(graph, costs, listed):
    """(peak, seconds) of every plan that the listed decisions allow."""
    simulator = Simulator(graph, costs)
    storages = sorted(listed)
    for combination in product(*(listed[s] for s in storages)):
        drops = {d.storage: d for d in combination if d.codec == "drop"}
        choices = call_choices(Reading(graph), drops)
        try:
            run = simulator.run(Plan("optimal", graph.fingerprint, combination, choices))
        except PlanError:
            continue
        yield run.peak_bytes, run.step_s


def thinned(data, listed):
    """At most COMBINATIONS combinations of the options, which ones is drawn."""
    left, found = COMBINATIONS, {}
    for storage in data.draw(st.permutations(sorted(listed))):
        most = min(len(listed[storage]), left, 5)
        picked = data.draw(st.permutations(listed[storage]))[: max(most, 1)]
        found[storage] = tuple(sorted(picked, key=listed[storage].index))
        left //= len(found[storage])
    return found


@pytest.mark.parametrize("device", [CPU, LINKED, SHARED, CUDA], ids=["cpu", "link", "shared", "cuda"])
@settings(deadline=None, max_examples=25, derandomize=True)
@given(data=st.data())
def test_equals_brute_force(device, data):
    graph = data.draw(step_graphs(8))
    costs = cost_table(graph, device)
    # With one row in the batch there are no slices or sub-batches; those have a test of their own.
    narrow = (("lossy", "fp8"), ("lossy", "fp16s")) if graph.batch == 1 else ()
    fidelity, lossy = data.draw(st.sampled_from((("bitwise", None), *narrow)))
    listed = thinned(data, options(graph, costs, fidelity, lossy))
    assert prod(map(len, listed.values())) <= COMBINATIONS
    runs = list(brute_force(graph, costs, listed))
    least, most = min(p for p, _ in runs), max(p for p, _ in runs)
    budget = least + round(data.draw(st.sampled_from((0.0, 0.1, 0.3, 0.5, 0.8, 1.0))) * (most - least))
    best = min(s for p, s in runs if p <= budget)

    plan = optimal(graph, costs, budget, fidelity=fidelity, lossy=lossy, options=listed, **FIXED)
    run = simulate(graph, plan, costs)
    assert run.peak_bytes == plan.peak_bytes <= budget
    assert run.step_s == plan.step_s
    assert plan.lower_bound_bytes <= least
    assert plan.step_s <= best * (1 + 1e-9) + ROOM * run.compute_s
    assert best <= plan.step_s * (1 + 1e-9)
    assert plan.gap == 0.0 and plan.sub_batches == 1
    if least > 1:
        with pytest.raises(BudgetError) as refused:
            optimal(graph, costs, least - 1, fidelity=fidelity, lossy=lossy, options=listed, **FIXED)
        assert refused.value.least_bytes == {fidelity: least}
