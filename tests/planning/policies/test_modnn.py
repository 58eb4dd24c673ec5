"""The policies modnn and vdnn+: schedules that hold what they promise, plans that the simulator confirms, bounds."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import gistkit
from bench.papers.algorithms import paper_algorithms
from bench.papers.modnn_devices import modnn_on_devices, modnn_schedule, paper_tdfg
from gistkit.errors import BudgetError
from gistkit.planning.cost.devices import PRESETS
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.modnn.modnn import Schedule, modnn
from gistkit.planning.policies.modnn.sub_batch import choose_sub_batch, parts_of
from gistkit.planning.policies.registry import POLICIES
from gistkit.planning.simulate.simulator import simulate
from tests.support.modnn_cases import FAST_LINK, GRAPHS, budget_between, least_bytes
from tests.support.step_graphs import chain, step_graphs

CLASSES = ("bitwise", "reassociated")
DEVICES = (FAST_LINK, PRESETS["cpu"])


def check_schedule(found, memory_bytes):
    """Replays a schedule: memory, data in place at every use, transfers one after the other and in time."""
    tdfg, costs = found.part.tdfg, found.part.costs
    assert max(r.memory_bytes for r in found.runs) <= memory_bytes
    finished = 0.0
    for t, run in enumerate(found.runs):
        needed = {d.block for d in tdfg.data if any(first <= t <= last for first, last in d.stays)}
        away = {a.block for a in found.absences.values() if a.release <= t < a.prefetch}
        assert not away & needed
        alive = [d for d in tdfg.data if d.stays[0][0] <= t <= d.stays[-1][1] and d.block not in needed | away]
        held = tdfg.demand_bytes[t] + costs.workspace_bytes(t, run.algorithm) + sum(d.nbytes for d in alive)
        # More than that only where data were fetched in vain: the absence goes on, the memory was taken.
        assert held + tdfg.resident_bytes <= run.memory_bytes
        assert run.finish_s - run.start_s == pytest.approx(costs.task_s(t, run.algorithm), abs=1e-12)
        assert run.start_s >= finished
        finished = run.finish_s
    link_free = 0.0
    for move in found.moves:
        assert move.start_s >= link_free
        link_free = move.finish_s
    movable = {d.block: d for d in tdfg.data if len(d.stays) > 1}
    for block, release, prefetch in found.absences.values():
        stay = next(first for first, _ in movable[block].stays if first >= release)
        assert release <= prefetch <= stay
        moves = [m for m in found.moves if m.block == block and m.nbytes == movable[block].nbytes]
        back = [m for m in moves if m.direction == "h2d" and m.task == prefetch]
        assert back and back[0].finish_s <= found.runs[stay].start_s + 1e-15
        out = [m for m in moves if m.direction == "d2h" and m.finish_s <= back[0].start_s]
        written = max(t for t in movable[block].writes if t < release)
        assert out and out[-1].start_s >= found.runs[written].finish_s


@settings(max_examples=20)
@given(step_graphs(), st.floats(0, 1), st.sampled_from((None, paper_tdfg)), st.sampled_from(CLASSES))
def test_schedules_never_exceed_memory_and_every_use_finds_its_block(graph, share, rule, fidelity):
    costs = cost_table(graph, FAST_LINK, ways=paper_algorithms)
    budget = budget_between(graph, costs, share, rule, fidelity)
    part, _ = choose_sub_batch(graph, costs, budget, rule=rule, fidelity=fidelity, batch_norm=True)
    check_schedule(Schedule(part, budget), budget)


@cache
def heavy(width=256):
    """A linear with more weights than a batch of 4 has activations: summed, its gradient costs more than whole maps."""
    linear, ones = torch.nn.Linear(64, width), torch.ones(4, width)
    found = gistkit.capture(linear, (torch.randn(4, 64),), backward=True, loss_fn=F.mse_loss, targets=(ones,))
    return replace(found, least_rows=1)


@settings(max_examples=20)
@given(
    step_graphs() | st.sampled_from((1, 16, 256)).map(heavy),
    st.floats(0, 1.2),
    st.sampled_from(CLASSES),
    st.sampled_from(DEVICES),
)
def test_plans_stay_in_the_budget_on_the_simulator_and_the_bound_is_sharp(graph, share, fidelity, device):
    costs = cost_table(graph, device)
    budget = budget_between(graph, costs, share, None, fidelity)
    plan = modnn(graph, costs, budget, fidelity=fidelity, batch_norm=True)
    assert plan.lower_bound_bytes <= plan.peak_bytes <= budget and plan.details["trainable"]
    assert plan.peak_bytes == simulate(graph, plan, costs).peak_bytes
    assert plan.sub_batches == 1 or fidelity == "reassociated"
    assert device.has_link or not [d for d in plan.decisions if d.place == "host"]
    assert plan.lower_bound_bytes == least_bytes(graph, costs, batch_norm=True)[fidelity]
    with pytest.raises(BudgetError):
        modnn(graph, costs, plan.lower_bound_bytes - 1, fidelity=fidelity, batch_norm=True)


def test_with_all_memory_it_is_the_ideal_case_and_with_less_never_faster():
    """Section V: every task at its fastest, nothing moved."""
    graph = GRAPHS["forked"]
    costs = cost_table(graph, FAST_LINK, ways=paper_algorithms)
    plan = modnn(graph, costs)  # the device's memory
    assert plan.sub_batches == 1 and not [d for d in plan.decisions if d.place == "host"]
    known = parts_of(graph, costs)(1).costs.algorithms
    ideal_s = sum(min(a.seconds for a in one) for one in known)
    assert plan.step_s == pytest.approx(ideal_s, rel=1e-9)
    shares = (0.0, 0.02, 0.05, 0.1, 0.3, 1.0)
    plans = [modnn(graph, costs, budget_between(graph, costs, share), batch_norm=True) for share in shares]
    assert all(plan.step_s >= ideal_s * (1 - 1e-9) for plan in plans)
    sizes = [plan.details["sub_batch"] for plan in plans]
    assert sizes == sorted(sizes) and sizes[0] == 1 and sizes[-1] == 8


def test_vdnn_plus_trains_where_vdnn_does_not():
    graph = chain(12, 64, 64, 32)
    costs = cost_table(graph, PRESETS["k40m"], ways=paper_algorithms)
    budget = budget_between(graph, costs, 0.02)
    assert not POLICIES["vdnn-dyn"](graph, costs, budget).details["trainable"]
    plan = POLICIES["vdnn+"](graph, costs, budget)
    assert plan.details["trainable"] and plan.sub_batches > 1 and plan.fidelity == "reassociated"
    assert plan.peak_bytes == simulate(graph, plan, costs).peak_bytes <= budget
    # The whole batch in moDNN's least memory for it: vDNN keeps more.
    whole = POLICIES["vdnn+"](graph, costs, least_bytes(graph, costs)["bitwise"], fidelity="bitwise")
    assert whole.sub_batches == 1 and not whole.details["trainable"]


@pytest.mark.parametrize("policy", ["modnn", "vdnn+"])
def test_a_budget_below_the_bound_is_refused_with_the_bound(policy):
    graph = GRAPHS["chain"]
    costs = cost_table(graph, FAST_LINK, ways=paper_algorithms)
    least = least_bytes(graph, costs)
    with pytest.raises(BudgetError, match=f"got {least['reassociated'] - 1} bytes") as caught:
        POLICIES[policy](graph, costs, least["reassociated"] - 1)
    assert caught.value.least_bytes == least
    text = str(caught.value)
    assert f"reassociated {least['reassociated']} bytes" in text and "no size of sub-batches would do" in text
    with pytest.raises(BudgetError, match='allow sub-batches with fidelity="reassociated"') as caught:
        POLICIES[policy](graph, costs, least["bitwise"] - 1, fidelity="bitwise")
    with pytest.raises(BudgetError) as caught:
        POLICIES[policy](graph, costs, least["reassociated"] + 9, reserve=10)
    assert caught.value.least_bytes["reassociated"] == least["reassociated"] + 10
    with pytest.raises(ValueError, match="fidelity must be one of bitwise, reassociated, lossy, got 'exact'"):
        POLICIES[policy](graph, costs, fidelity="exact")
    with pytest.raises(ValueError, match="capture it with backward=True"):
        POLICIES[policy](replace(graph, tasks=(), blocks=()), replace(costs, algorithms=()))


def test_two_devices_take_half_the_batch_each_and_gather_the_gradients():
    graph = chain(12, 64, 64, 32)
    costs = cost_table(graph, PRESETS["k40m"], ways=paper_algorithms)
    one, two = (modnn_on_devices(graph, costs, n) for n in (1, 2))
    assert one.step_s == modnn_schedule(graph, costs).step_s and one.gather_s == 0.0
    assert two.each.part.size == 16
    gradients = sum(b.nbytes for b in graph.blocks if b.kind == "weight_gradient")
    assert two.gather_s == pytest.approx(costs.h2d_s(gradients) + costs.copy_s(3 * gradients))
    # Nothing is offloaded: half the work (but for launches) and the exchange.
    assert 0.5 * one.step_s <= two.each.step_s <= 0.55 * one.step_s
    with pytest.raises(ValueError, match="devices must be an int from 1 to the batch size 32, got 33"):
        modnn_on_devices(graph, costs, 33)
