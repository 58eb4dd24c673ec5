"""gistkit.plan: the face, budgets met and refused, every policy behind it, what is said of wrong arguments."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import gistkit
from gistkit.api import planning
from gistkit.api.planning import plan_graph
from gistkit.ir.plan import Plan
from gistkit.planning import choose, least_bytes
from gistkit.planning.cost.devices import PRESETS, hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.registry import POLICIES
from gistkit.planning.simulate.simulator import simulate
from gistkit.profiling.calibration import card
from tests.support.graphs import of_zoo
from tests.support.planning_cases import GIB, H200, T, X, made, net


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


def test_the_preset_and_the_card_hold_the_same():
    x = torch.randn(2, 3, 32, 32)
    by_name, free = (gistkit.plan(net(), x, policy="plain", hardware=h, reserved_bytes=55) for h in ("h200", H200))
    assert by_name.peak_bytes - free.peak_bytes == 96 * 2**20
    by_card = gistkit.plan(net(), x, policy="plain", hardware=card("NVIDIA H200", GIB))
    assert by_card.peak_bytes + 55 == by_name.peak_bytes
    assert by_name.contract.reserved_bytes == free.contract.reserved_bytes == 55
    assert [name for name, preset in PRESETS.items() if not preset.libraries_bytes] == ["titanx", "k40m", "cpu"]


def test_hardware_without_a_link():
    text = r"policy=\"vdnn-all\" moves tensors to the host, and hardware 'cpu' has no"
    with pytest.raises(gistkit.PlanError, match=text):
        made(hardware="cpu", policy="vdnn-all")
    assert made(hardware="cpu", budget="80%").peak_bytes < made(hardware="cpu", policy="plain").peak_bytes


def test_cards():
    assert card("NVIDIA H200", 100 * GIB).name == "h200" and card("NVIDIA H200", 100 * GIB).memory_bytes == 100 * GIB
    assert card("NVIDIA TITAN X (Pascal)", GIB).name == card("GeForce GTX TITAN X", GIB).name == "titanx"
    assert card("Tesla K40m", GIB).name == "k40m"
    assert card("NVIDIA H200", 100 * GIB).libraries_bytes == 96 * 2**20
    assert card("NVIDIA A100-SXM4-80GB", 80 * GIB) == replace(PRESETS["a100-80gb-sxm"], memory_bytes=80 * GIB)
    assert card("NVIDIA H800", 80 * GIB) is None, "no card is planned at another's rates"


def test_a_plan_says_where_its_rates_are_from(tmp_path):
    assert made(hardware=None).prediction.rates == "preset cpu: orders of magnitude of one core"
    assert made(hardware="rtx4090").prediction.rates.startswith("preset rtx4090: NVIDIA Ada (RTX 4090) datasheet")
    own = replace(PRESETS["h200"], name="mine", source="")
    assert made(hardware=own).prediction.rates == "given as mine"
    file = tmp_path / "mine.json"
    file.write_text(replace(own, source="calibrated 2026-11-22, torch 2.13").to_json())
    found = made(hardware=file)
    assert found.hardware == "mine" and found.prediction.rates == f"file {file}, calibrated 2026-11-22, torch 2.13"
    assert gistkit.Plan.from_json(found.to_json()) == found


def test_who_was_left_out_for_times_sake_is_named(monkeypatch):
    """No time for moDNN's schedule of a large step; the plan still says so when it was a file."""
    graph = of_zoo("vgg16", 32)
    costs = cost_table(graph, hardware("titanx"))
    budget = POLICIES["plain"](graph, costs).peak_bytes
    assert plan_graph(graph, costs, budget=budget).prediction.not_compared == ()
    monkeypatch.setattr(choose, "LARGE_TASKS", 10)
    plan = plan_graph(graph, costs, budget=budget)
    assert plan.prediction.not_compared == ("modnn",)
    assert Plan.from_json(plan.to_json()) == plan
