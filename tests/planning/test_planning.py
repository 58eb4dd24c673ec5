"""gistkit.plan: the face, budgets met and refused, every policy behind it, what is said of wrong arguments."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import gistkit
from gistkit.api import planning
from gistkit.ir.plan import Plan
from gistkit.planning import least_bytes
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.registry import POLICIES
from gistkit.planning.simulate.simulator import simulate
from tests.support.planning_cases import H200, T, X, made, net


@pytest.fixture(scope="module")
def step():
    graph = gistkit.capture(net(), (X,), backward=True, loss_fn=F.cross_entropy, targets=(T,))
    return graph, cost_table(graph, H200)


def test_a_plan_says_what_it_is_for():
    found = made(budget="72%")  # on tensor cores bitwise needs 71.8 %: the largest convolution's workspace stays
    plain = made(policy="plain")
    assert found.policy == "optimal" and found.fidelity == "bitwise" and found.hardware == "h200"
    assert found.budget_bytes == int(0.72 * plain.peak_bytes) >= found.peak_bytes >= found.lower_bound_bytes > 0
    assert found.step_s > 0 and found.gap is not None and found.gap >= 0 and found.sub_batches == 1
    contract, prediction = found.contract, found.prediction
    assert (contract.batch, contract.fidelity, contract.lossy, contract.reserved_bytes) == (8, "bitwise", None, 0)
    assert contract.training and contract.autocast == "no autocast" and contract.saved_bytes == found.plain_bytes
    assert [(t.dtype, t.shape, t.requires_grad) for t in contract.inputs or ()] == [("float32", tuple(X.shape), False)]
    assert (prediction.plain_peak_bytes, prediction.plain_step_s) == (plain.peak_bytes, plain.step_s)
    assert Plan.from_json(found.to_json()) == found


def test_real_fake_and_meta_are_planned_alike():
    real = made(policy="checkpoint")
    with torch.device("meta"):
        meta = net()
    there = gistkit.plan(meta, X.to("meta"), T.to("meta"), loss_fn=F.cross_entropy, hardware=H200, policy="checkpoint")
    with FakeTensorMode() as mode:
        fake = net()
        x, t = mode.from_tensor(X), mode.from_tensor(T)
    faked = gistkit.plan(fake, x, t, loss_fn=F.cross_entropy, hardware=H200, policy="checkpoint")
    for other in (there, faked):
        assert (other.decisions, other.choices, other.peak_bytes) == (real.decisions, real.choices, real.peak_bytes)


def test_a_callers_mode_of_fake_tensors_changes_nothing():
    model, x, words = net(), X, {"budget": "90%", "hardware": "cpu", "fidelity": "reassociated", "policy": "modnn"}
    expected = gistkit.plan(model, x, **words)
    with FakeTensorMode():
        inside = gistkit.plan(model, x, **words)
        fakes = gistkit.plan(net(), torch.empty(x.shape), **words)
        assert isinstance(torch.empty(1), FakeTensor)
    assert inside.decisions == fakes.decisions == expected.decisions


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy(policy, step):
    graph, costs = step
    found = planning.plan_graph(graph, costs, policy=policy)
    assert found.policy == policy and found.fidelity == "bitwise" and found.budget_bytes is None
    assert found.peak_bytes == simulate(graph, found, costs).peak_bytes
    with_reserve = planning.plan_graph(graph, costs, policy=policy, reserved_bytes="1MiB")
    assert with_reserve.peak_bytes == simulate(graph, with_reserve, costs).peak_bytes + 2**20
    assert with_reserve.contract.reserved_bytes == 2**20


@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_libraries_hold_counts_everywhere(policy, step):
    graph, costs = step
    held = replace(costs, hardware=replace(H200, libraries_bytes=12345))
    free, found = (planning.plan_graph(graph, c, policy=policy) for c in (costs, held))
    assert found.peak_bytes - free.peak_bytes == 12345
    assert found.lower_bound_bytes - free.lower_bound_bytes == (12345 if free.lower_bound_bytes else 0)
    assert (found.decisions, found.choices, found.sub_batches) == (free.decisions, free.choices, free.sub_batches)
    assert found.prediction.plain_peak_bytes - free.prediction.plain_peak_bytes == 12345  # what shares are of
    if policy not in ("modnn", "vdnn+"):  # which refuse below a bound of their own
        assert planning.plan_graph(graph, held, policy=policy, budget=found.peak_bytes).peak_bytes <= found.peak_bytes


def test_a_budget_below_the_least(step):
    graph, costs = step
    with pytest.raises(gistkit.BudgetError) as raised:
        planning.plan_graph(graph, costs, budget="20kB")
    error = raised.value
    assert list(error.least_bytes) == ["bitwise", "reassociated", "lossy"] and error.budget_bytes == 20_000
    least = error.least_bytes
    assert str(error) == (
        "the budget must be at least what the step needs, by the class of moves: "
        + ", ".join(f"{name} {n} bytes ({n / 2**20:.1f} MiB)" for name, n in least.items())
        + f"; got 20000 bytes (0.0 MiB): no class of moves would do; raise the budget to {least['bitwise']} bytes "
        "or take a smaller batch"
    )


def test_a_budget_that_another_class_can_meet(step):
    graph, costs = step
    least = least_bytes(graph, costs)
    assert least["reassociated"] < least["bitwise"]
    with pytest.raises(gistkit.BudgetError) as raised:
        planning.plan_graph(graph, costs, budget=least["bitwise"] - 1)
    assert str(raised.value).endswith(
        ': fidelity="reassociated" (sums in another order: sub-batches) or lossy="fp8" (rounded '
        "activations) would do; or raise the budget, or take a smaller batch"
    )
    found = planning.plan_graph(graph, costs, budget=least["bitwise"] - 1, fidelity="reassociated")
    assert found.fidelity == "reassociated"


def test_a_policy_that_cannot_meet_a_budget(step):
    graph, costs = step
    peaks = {name: planning.plan_graph(graph, costs, policy=name).peak_bytes for name in ("plain", "vdnn-all")}
    budget = peaks["vdnn-all"] - 1
    with pytest.raises(
        gistkit.BudgetError, match=r'policy="vdnn-all" needs \d+ bytes \(\d\.\d MiB\); policy="optimal" fits'
    ):
        planning.plan_graph(graph, costs, policy="vdnn-all", budget=budget)
    with pytest.raises(
        gistkit.BudgetError, match=r'policy="plain" needs .*; with policy="optimal" no class of moves would'
    ):
        planning.plan_graph(graph, costs, policy="plain", budget=1000)
    assert planning.plan_graph(graph, costs, policy="plain", budget=1000, refuse=False).peak_bytes == peaks["plain"]
