"""Engines of cuDNN as algorithms of single tasks, on costs by hand: what each policy takes, in which class."""

from dataclasses import replace

import pytest

from bench.papers.library_view import library_view
from gistkit.errors import BudgetError
from gistkit.ir import CallChoice, Decision, scaled
from gistkit.planning.cost import Algorithm, CostTable, of_part
from gistkit.planning.policies import POLICIES, minimise_peak, vdnn
from gistkit.planning.policies.optimal.optimal import optimal
from gistkit.planning.simulate import scaled_costs, simulate
from tests.support.paper_costs import device
from tests.support.step_graphs import chain

OWN, LEAN, FAST = 40000, 0, 30000
PARTS = ("forward", "weight", "input")


def costs_of(graph, engines=True, fast_s=0.5):
    """A second a task. PyTorch takes 40000 bytes for a convolution's; of two engines the numbers differ by the part."""

    def ways(task):
        if not task.conv:
            return (Algorithm("", 1.0, 0),)
        own = (Algorithm("default", 1.0, OWN),)
        number = PARTS.index(task.part_name)
        lean = Algorithm(f"engine{number}", 2.0, LEAN)
        return own + (Algorithm(f"engine7{number}", fast_s, FAST), lean) * engines

    return CostTable(device(), tuple(ways(t) for t in graph.tasks), {})


@pytest.fixture(scope="module")
def graph():
    return library_view(chain(layers=3))


def named(plan):
    return {name for c in plan.choices if c.algorithm for part in PARTS if (name := of_part(c.algorithm, part))}


def test_m_and_p_take_an_engine_for_each_task(graph):
    costs = costs_of(graph)
    small, fast = (vdnn.vdnn_all(graph, costs, algorithms=which) for which in "mp")
    assert named(small) == {"engine0", "engine1", "engine2"} and named(fast) == {"engine70", "engine71", "engine72"}
    assert small.choices[-1].algorithm == "forward=engine0,weight=engine1,input=engine2"
    assert fast.step_s < small.step_s and small.peak_bytes < fast.peak_bytes
    assert small.fidelity == fast.fidelity == "reassociated"
    assert vdnn.vdnn_all(graph, costs_of(graph, engines=False)).fidelity == "bitwise"


def test_tasks_of_a_call_without_a_common_name(graph):
    """As where one task of a convolution was measured, and another was not."""
    costs = costs_of(graph, engines=False)
    forward = {t.index for t in graph.tasks if t.phase == "forward"}
    other = (Algorithm("implicit_precomp_gemm", 1.0, 16),)
    mixed = (other if t in forward and a[0].name else a for t, a in enumerate(costs.algorithms))
    plan = vdnn.vdnn_all(graph, replace(costs, algorithms=tuple(mixed)))
    assert plan.choices[-1].algorithm == "forward=implicit_precomp_gemm,weight=default,input=default"
    assert plan.fidelity == "bitwise"


def test_dyn_downgrades_a_layer_to_less_workspace(graph):
    costs = costs_of(graph)
    fast, lean = (vdnn.vdnn(graph, costs, offload="all", algorithms=which) for which in "pm")
    plan = vdnn.vdnn_dyn(graph, costs, (fast.peak_bytes + lean.peak_bytes) // 2)
    assert plan.details["phase"] == 3 and plan.peak_bytes <= (fast.peak_bytes + lean.peak_bytes) // 2
    assert {"engine70", "engine71", "engine72"} & named(plan) and {"engine0", "engine1", "engine2"} & named(plan)


def test_cdma_counts_the_engines_seconds(graph):
    assert POLICIES["cdma"](graph, costs_of(graph)).step_s < POLICIES["cdma"](graph, costs_of(graph, fast_s=0.9)).step_s


def test_modnn_weighs_workspace_against_time(graph):
    costs = costs_of(graph)
    roomy = POLICIES["modnn"](graph, costs, 2**22)
    assert named(roomy) == {"engine70", "engine71", "engine72"} and roomy.fidelity == "reassociated"
    assert roomy.sub_batches == 1
    tight = POLICIES["modnn"](graph, costs, roomy.lower_bound_bytes + 6000)
    assert tight.sub_batches > 1 and named(tight) <= {"default", "engine0", "engine1", "engine2"}


def test_a_sub_batch_has_the_engines_without_workspace(graph):
    costs = costs_of(graph)
    half = scaled_costs(costs, graph, scaled(graph, 2))
    conv = next(t.index for t in graph.tasks if t.conv)
    assert [(a.name, a.workspace_bytes) for a in half.algorithms[conv]] == [("default", OWN // 2), ("engine0", 0)]


@pytest.mark.parametrize("step", [chain(layers=3)])
def test_optimal_in_its_classes(step):
    costs = costs_of(step)
    exact, wide = optimal(step, costs), optimal(step, costs, fidelity="reassociated")
    assert named(exact) == set() and exact.fidelity == "bitwise"
    assert named(wide) == {"engine70", "engine71", "engine72"} and wide.fidelity == "reassociated"
    assert wide.step_s < exact.step_s and wide.gap == 0.0
    assert exact.step_s == optimal(step, costs_of(step, engines=False)).step_s
    least = minimise_peak(step, costs, "reassociated").peak_bytes
    assert (
        least < minimise_peak(step, costs).peak_bytes == minimise_peak(step, costs_of(step, engines=False)).peak_bytes
    )
    tight = optimal(step, costs, least, fidelity="reassociated")
    assert tight.peak_bytes <= least and tight.step_s > wide.step_s
    assert simulate(step, tight, costs).peak_bytes == tight.peak_bytes
    with pytest.raises(BudgetError) as refused:
        optimal(step, costs, tight.lower_bound_bytes - 1, fidelity="reassociated")
    assert refused.value.least_bytes["reassociated"] <= least


def test_optimal_takes_the_fastest_engines_that_its_room_allows():
    step = replace(chain(layers=3), least_rows=2)  # no sub-batches
    costs = costs_of(step)
    least = minimise_peak(step, costs, "reassociated").peak_bytes + 100
    wide = optimal(step, costs, fidelity="reassociated")
    budgets = range(least, wide.peak_bytes, 4096)
    plans = [optimal(step, costs, n, fidelity="reassociated", reserve=100) for n in budgets]
    assert all(p.peak_bytes <= n for p, n in zip(plans, budgets, strict=True))
    assert [p.step_s for p in plans] == sorted((p.step_s for p in plans), reverse=True)
    kinds = [({name[:7] == "engine7" for name in named(p)}) for p in plans]
    assert kinds[0] == {False} and {False, True} in kinds


def test_a_reruns_workspace_counts_where_it_runs():
    """Of the second convolution, at the start of the third one's weight gradient, whose own engine has none."""
    step = chain(layers=3)
    costs = costs_of(step)
    convs = [c for c in step.calls if c.op == "conv2d"]
    relus = [step.values[c.results[0]].storage for c in step.calls if c.op == "relu"]
    again = Decision(relus[1], "recompute", "nowhere", sources=(relus[0],))
    plan = replace(vdnn.vdnn(step, costs, offload="none"), decisions=(again,))

    def memory(forward):
        text = f"forward={forward},weight=engine1,input=engine2"
        choices = tuple(CallChoice(c.covered, c.op, algorithm=text) for c in convs)
        return simulate(step, replace(plan, choices=choices), costs).memory_bytes

    more = [b - a for a, b in zip(memory("engine0"), memory("default"), strict=True)]
    tasks = [t.index for t, n in zip(step.tasks, more, strict=True) if n == OWN]
    third = next(t.index for t in step.tasks if t.call == convs[2].index and t.part == "weight")
    assert tasks == [*(t.index for t in step.tasks if t.conv and t.phase == "forward"), third]
    assert set(more) == {0, OWN}
