"""`optimal` against brute force through the simulator and against other policies; the least peak that it names."""

from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import product
from math import prod
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import gistkit
from bench.optimal import line, rows, wrong
from gistkit.errors import BudgetError, PlanError
from gistkit.ir.plan import Plan
from gistkit.ir.queries import Reading
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.forms.options import options
from gistkit.planning.forms.readers import call_choices
from gistkit.planning.policies.checkpoint import checkpoint
from gistkit.planning.policies.optimal import problem, search, solve
from gistkit.planning.policies.optimal.optimal import Planning, minimise_peak, optimal
from gistkit.planning.policies.optimal.plans import plan_of
from gistkit.planning.policies.optimal.problem import Problem
from gistkit.planning.policies.optimal.state import IncrementalState
from gistkit.planning.policies.optimal.variants import Allowed
from gistkit.planning.policies.registry import POLICIES, plain
from gistkit.planning.simulate.simulator import Simulator, simulate
from tests.support.graphs import of_zoo
from tests.support.step_graphs import chain, forked, pooled, step_graphs

COMBINATIONS = 400
CPU = hardware("cpu")
# Slow enough that a transfer takes as long as several layers, fast enough that some of it is hidden.
LINKED = replace(CPU, d2h_gbps=6.0, h2d_gbps=8.0, both_gbps=14.0, launch_s=1e-7)
SHARED = replace(LINKED, both_gbps=9.0)
CUDA = replace(
    LINKED, async_counts=True, codec_slowdown=1.0, libraries_bytes=4321, runtime_host_s=3e-5, link_interference=0.3
)
FIXED = {"time_limit_s": 20}
NEAR = 1.01
"""What the search promises: within 1 % of the best plan, above what the gap says no plan is below."""
ROOM = 1e-5
"""A gap below it is none."""


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


@contextmanager
def restricted(listed):
    """`optimal` with the listed decisions alone: no segments, no transfers at other moments."""
    with (
        mock.patch.object(problem, "options", lambda *_: dict(listed)),
        mock.patch.object(problem, "candidates", lambda *_: ((), [])),
        mock.patch.object(solve, "retimed", lambda *_: ()),
    ):
        yield


def every_choice(of):
    """(peak, seconds) of every choice of a problem that is none of another."""
    for taken in product(*(range(len(group)) for group in of.groups)):
        if tuple(IncrementalState(of, taken).taken) == taken:
            with suppress(PlanError):
                run = of.simulator.run(plan_of(of, taken))
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


def check(graph, costs, runs, share, fidelity="bitwise", *, exact=True, **words):
    """A plan for a budget between the least and the most of ``runs`` (if ``exact``: of all), a refusal below."""
    least, most = min(p for p, _ in runs), max(p for p, _ in runs)
    budget = least + round(share * (most - least))
    best = min(s for p, s in runs if p <= budget)
    plan = optimal(graph, costs, budget, fidelity=fidelity, **words)
    run = simulate(graph, plan, costs)
    assert run.peak_bytes == plan.peak_bytes <= budget and run.step_s == plan.step_s
    assert plan.lower_bound_bytes <= least
    assert plan.step_s <= best * NEAR
    assert plan.step_s * (1 - plan.gap) <= best * (1 + ROOM)
    assert best <= plan.step_s * (1 + 1e-9) or not exact
    smallest = minimise_peak(graph, costs, fidelity, **words)
    assert smallest.peak_bytes == simulate(graph, smallest, costs).peak_bytes <= least * NEAR
    assert smallest.lower_bound_bytes <= least and smallest.gap is None and smallest.fidelity in ("bitwise", fidelity)
    if exact:
        with pytest.raises(BudgetError) as refused:
            optimal(graph, costs, least - 1, fidelity=fidelity, **words)
        assert least <= refused.value.least_bytes[fidelity] <= least * NEAR
    return plan


@pytest.mark.parametrize("device", [SHARED, CUDA], ids=["shared", "cuda"])
@settings(max_examples=6)
@given(data=st.data())
def test_near_brute_force(device, data):
    graph = data.draw(st.one_of(step_graphs(8), step_graphs(8, size=64, grown=True)))
    costs = cost_table(graph, device)
    # With one row in the batch there are no sub-batches; those have a test of their own.
    narrow = (("lossy", "fp8"), ("lossy", "fp16s")) if graph.batch == 1 else ()
    fidelity, lossy = data.draw(st.sampled_from((("bitwise", None), *narrow)))
    listed = thinned(data, options(graph, costs, lossy))
    assert prod(map(len, listed.values())) <= COMBINATIONS
    share = data.draw(st.sampled_from((0.0, 0.1, 0.3, 0.5, 0.8, 1.0)))
    with restricted(listed):
        plan = check(graph, costs, [*brute_force(graph, costs, listed)], share, fidelity, lossy=lossy, **FIXED)
    assert plan.sub_batches == 1


@pytest.mark.parametrize("device", [CPU, CUDA], ids=["cpu", "cuda"])
@settings(max_examples=6, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data())
def test_segments_near_brute_force(device, data):
    graph = data.draw(step_graphs(data.draw(st.integers(3, 5)), size=32, grown=True, varied=True))
    costs = cost_table(graph, device)
    whole = Problem(graph, costs, Simulator(graph, costs), Allowed())
    assume(whole.segments and prod(map(len, whole.groups)) <= COMBINATIONS)
    # over a link times are chosen that are no forms at first
    share = data.draw(st.sampled_from((0.0, 0.1, 0.4, 0.8)))
    check(graph, costs, [*every_choice(whole)], share, exact=not device.has_link, **FIXED)


def test_a_plan_is_the_same_every_time(monkeypatch):
    for module in (search, solve):
        monkeypatch.setattr(module, "PATIENCE", 10)  # a search gives up early, the same way each time
    graph = forked(1, 8, 32, 4)
    costs = cost_table(graph, CUDA)
    budget = round(minimise_peak(graph, costs).peak_bytes * 1.02)
    assert optimal(graph, costs, budget, time_limit_s=60) == optimal(graph, costs, budget, time_limit_s=60)


def test_without_a_budget_nothing_is_paid_for():
    graph = pooled(size=32, batch=4)
    costs = cost_table(graph, CPU)
    plan = optimal(graph, costs)
    assert {d.codec for d in plan.decisions} <= {"dense", "drop", "mask1", "argmax4", "bits"}
    assert plan.gap == 0.0 and plan.budget_bytes is None
    assert plan.step_s <= POLICIES["plain"](graph, costs, None).step_s
    assert all(d.reason for d in plan.decisions)
    assert Plan.from_json(plan.to_json()) == plan


def test_batch_norm_is_not_cut_unless_accepted():
    graph = forked(1, 8, 32, 4)
    costs = cost_table(graph, CPU)
    refused = minimise_peak(graph, costs, "reassociated").peak_bytes
    accepted = minimise_peak(graph, costs, "reassociated", batch_norm=True).peak_bytes
    assert accepted < refused
    assert optimal(graph, costs, refused, fidelity="reassociated").sub_batches == 1
    cut = optimal(graph, costs, 2 * accepted, fidelity="reassociated", batch_norm=True)
    assert cut.sub_batches == 4 and cut.kept_bytes < cut.plain_bytes / 3  # what one of the parts keeps


def test_never_slower_than_a_policy_that_fits():
    name = "nin"
    graph = of_zoo(name, 32)
    found = list(rows(name, graph, cost_table(graph, hardware("h200")), 3))
    assert len(found) == 3
    assert [wrong(row) for row in found] == ["", "", ""]
    assert any(p["fits"] for p in found[-1]["policies"].values())
    assert name in line(found[0])


@pytest.mark.parametrize("fidelity", ["reassociated", "lossy"])
def test_a_wider_class_is_never_slower(fidelity, monkeypatch):
    """Where its larger program finds nothing in its time, the bitwise plan is there."""
    graph = chain(6, 8, 32, 4)  # whose maps shrink in none of its layers: segments pay
    costs = cost_table(graph, CPU)
    budget = int(POLICIES["plain"](graph, costs).peak_bytes * 0.8)
    bitwise = optimal(graph, costs, budget)
    run = Planning.run

    def nothing(planning):
        run(planning)
        planning.plan = planning.plan if planning._allowed.fidelity == "bitwise" else None

    words = {"fidelity": fidelity, "lossy": "fp8" if fidelity == "lossy" else None}
    wide = optimal(graph, costs, budget, **words)
    assert wide.step_s <= bitwise.step_s * (1 + 1e-9)
    monkeypatch.setattr(Planning, "run", nothing)
    taken = optimal(graph, costs, budget, **words)
    assert (taken.step_s, taken.decisions, taken.fidelity) == (bitwise.step_s, bitwise.decisions, "bitwise")
    assert taken.peak_bytes <= budget and taken.details["fidelity"] == fidelity and "taken_from" not in taken.details


def convolutions():
    layers = [m for _ in range(6) for m in (nn.GELU(), nn.Conv2d(8, 8, 3, padding=1))]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), *layers, *head)


def test_what_can_only_be_kept_as_it_is_may_run_anew():
    """Without a link many storages have one form only; those that segments bring back are no less free."""
    with torch.device("meta"):
        x, y = torch.empty(4, 8, 32, 32), torch.empty(4, dtype=torch.long)
        graph = gistkit.capture(convolutions(), (x,), backward=True, loss_fn=F.cross_entropy, targets=(y,))
    costs = cost_table(graph, CPU)
    plan = checkpoint(graph, costs)
    again = [d for d in plan.decisions if d.codec == "recompute"]
    least = minimise_peak(graph, costs, time_limit_s=0.5)
    assert again and least.lower_bound_bytes <= least.peak_bytes <= plan.peak_bytes * NEAR
    found = optimal(graph, costs, plan.peak_bytes, seeds=[plan], time_limit_s=0.5)
    assert found.peak_bytes <= plan.peak_bytes and found.step_s <= plan.step_s
    assert found.gap is not None and found.step_s * (1 - found.gap) <= plan.step_s


def test_a_search_that_is_cut_short_gives_its_best_plan_and_a_true_gap():
    graph = of_zoo("resnet18")
    costs = cost_table(graph, hardware("h200"))
    budget = plain(graph, costs).peak_bytes * 19 // 20
    cut, long = (optimal(graph, costs, budget, time_limit_s=seconds) for seconds in (1e-3, 0.5))
    for plan in (cut, long):
        run = simulate(graph, plan, costs)
        assert run.peak_bytes == plan.peak_bytes <= budget and run.step_s == plan.step_s
        assert plan.gap is not None and 0 <= plan.gap < 1
    # Each gap is against a bound from below on every plan, so on the other's too.
    assert cut.step_s * (1 - cut.gap) <= long.step_s * (1 + 1e-5)
    assert long.step_s * (1 - long.gap) <= cut.step_s * (1 + 1e-5)
