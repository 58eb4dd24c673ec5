"""Checkpoints, Gist with a budget, vDNN's baselines, and what holds for every policy."""

import pytest
from hypothesis import given, settings

from bench.papers.baselines import average_bytes, network_wide, oracular_s
from bench.papers.library_view import library_view
from gistkit.api.planning import plan_graph
from gistkit.commands.plan import compare
from gistkit.ir.plan import Plan
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.forms import make_plan, own_decisions
from gistkit.planning.policies.checkpoint import checkpoint, cuts
from gistkit.planning.policies.gist_rules import gist_budget
from gistkit.planning.policies.registry import POLICIES, plain
from gistkit.planning.policies.vdnn import vdnn
from gistkit.planning.simulate.simulator import simulate
from tests.support.paper_costs import WORKSPACE, costs_of
from tests.support.step_graphs import chain, pooled, step_graphs

OURS = ("plain", "gist", "vdnn-all", "vdnn-conv", "vdnn-dyn", "cdma", "checkpoint")


@settings(deadline=None, max_examples=25, derandomize=True)
@given(step_graphs())
def test_every_plan_is_simulated_as_it_says(graph):
    for seen in (graph, library_view(graph)):
        costs = cost_table(seen, hardware("titanx"))
        for name in OURS:
            plan = POLICIES[name](seen, costs, 10**6)
            run = simulate(seen, plan, costs)
            assert (plan.peak_bytes, plan.step_s) == (run.peak_bytes, run.step_s), name
            assert plan.details["trainable"] == (plan.peak_bytes <= 10**6)
            assert (plan.budget_bytes, plan.hardware) == (10**6, "titanx")
            assert plan.fidelity == "bitwise"
            assert Plan.from_json(plan.to_json()) == plan


def test_a_new_policy_is_a_function_and_a_row(monkeypatch):
    def small_maps(graph, costs, budget_bytes=None):
        return make_plan("small-maps", graph, costs, budget_bytes, own_decisions(graph))

    graph = pooled()
    costs = costs_of(graph)
    monkeypatch.setitem(POLICIES, "small-maps", small_maps)
    plan = plan_graph(graph, costs, policy="small-maps")
    assert plan.policy == "small-maps" and plan.kept_bytes < plan.plain_bytes
    words = {"fidelity": "bitwise", "lossy": None, "reserved_bytes": 0, "per_sub_batch_norm": False}
    assert compare(graph, costs, None, words)[-1].plan == plan


def test_a_checkpoint_runs_its_segments_anew():
    """One second a task, so every ReLU output that comes back costs its convolution and itself: two seconds."""
    graph = chain(layers=12)
    costs = costs_of(graph)
    whole, parts = checkpoint(graph, costs, segments=1), checkpoint(graph, costs, segments=4)
    assert whole.decisions == () and whole.peak_bytes == plain(graph, costs).peak_bytes
    assert {d.codec for d in parts.decisions} == {"recompute"} and parts.details["segments"] == 4
    assert len({d.sources for d in parts.decisions}) == 3
    boundaries = {s for d in parts.decisions for s in d.sources}
    assert boundaries.isdisjoint({d.storage for d in parts.decisions})
    assert len(parts.decisions) >= 5
    assert parts.step_s - whole.step_s == 2 * len(parts.decisions)
    assert parts.peak_bytes < whole.peak_bytes
    assert whole.kept_bytes - parts.kept_bytes == 8192 * len(parts.decisions)


def test_checkpoints_grow_with_the_root_of_the_depth():
    """4 and 16 times the layers: boundaries and one segment grow as sqrt(n), 2 and 4 times, plain grows with n. The
    count of segments is rounded and tried in steps of 1.4 around the root: up to 1.5 times more."""
    peaks = {}
    for layers in (8, 32, 128):
        graph = chain(layers=layers, size=8)
        costs = costs_of(graph)
        weights = 2 * sum(b.nbytes for b in graph.blocks if b.kind == "weight")
        peaks[layers] = [p(graph, costs).peak_bytes - weights for p in (plain, checkpoint)]
    assert peaks[128][0] > 10 * peaks[8][0]
    assert peaks[128][1] < 6 * peaks[8][1] and peaks[32][1] < 3 * peaks[8][1]
    assert checkpoint(graph, costs, segments=500).details["segments"] <= len(cuts(graph)) + 1
    with pytest.raises(ValueError, match=r"segments must be 1 .* got 0"):
        checkpoint(graph, costs, segments=0)


def test_gists_encodings_one_by_one():
    graph = library_view(pooled(size=64), maps=True)
    costs = cost_table(graph, hardware("titanx"), density=0.2)
    kept = {}
    for encodings in ((), ("binarize",), ("ssdc",), ("binarize", "ssdc")):
        plan = gist_budget(graph, costs, encodings=encodings)
        codecs = {d.codec for d in plan.decisions} - {"dense"}
        assert all(c.startswith(("zvc", "csr")) for c in codecs) == ("binarize" not in encodings), codecs
        kept[encodings] = plan.kept_bytes
    both = kept["binarize", "ssdc"]
    assert both < min(kept["binarize",], kept["ssdc",]) <= max(kept["binarize",], kept["ssdc",]) < kept[()]


def test_without_dpr_no_value_is_narrowed():
    """Gist, IV-A: DPR goes over SSDC's values as well; without it they stay FP32."""
    graph = chain(layers=3)
    costs = cost_table(graph, hardware("titanx"), density=0.2)
    exact = gist_budget(graph, costs, encodings=("ssdc",))
    assert any(d.codec == "zvc" for d in exact.decisions)
    found = gist_budget(graph, costs, lossy="fp8", encodings=("ssdc",))
    assert (found.decisions, found.fidelity) == (exact.decisions, "bitwise")
    both = gist_budget(graph, costs, lossy="fp8", encodings=("ssdc", "dpr"))
    assert any(d.codec == "zvc+fp8" for d in both.decisions) and both.fidelity == "lossy"
    with pytest.raises(ValueError, match="lossy must be None or one of"):
        gist_budget(graph, costs, lossy="fp7", encodings=("ssdc",))


def test_network_wide_allocation():
    """Two layers in place. Maps: input 6144, two of 8192, the loss. dX and dY: at most two at once, 8192 each."""
    graph = library_view(chain(layers=2))
    costs = costs_of(graph, workspace=WORKSPACE)
    by_task = {t.index: "winograd" for t in graph.tasks if t.conv}
    base = network_wide(graph, costs, by_task)
    assert base.feature_map_bytes == 6144 + 2 * 8192 + 4
    assert base.gradient_map_bytes == 2 * 8192
    assert base.workspace_bytes == WORKSPACE
    weights = 4 * (4 * 3 * 9 + 4 + 4 * 4 * 9 + 4)
    assert base.weight_bytes == 2 * weights
    assert base.total_bytes == 2 * weights + 6144 + 2 * 8192 + 4 + 2 * 8192 + WORKSPACE
    assert network_wide(graph, costs).workspace_bytes == WORKSPACE // 2  # the default's
    deep = library_view(chain(layers=6))
    apart, reused = (network_wide(deep, costs_of(deep), improved=i) for i in (False, True))
    assert apart.gradient_map_bytes == 6 * 8192 and reused.gradient_map_bytes == 2 * 8192


def test_the_oracle_takes_every_layers_fastest_algorithm():
    graph = library_view(pooled())
    costs = costs_of(graph, workspace=WORKSPACE)
    assert oracular_s(graph, costs) == len(graph.tasks)  # winograd: one second, as all other tasks
    features = oracular_s(graph, costs, features_only=True)
    assert features == len(graph.tasks) - 7  # FC: 3 tasks, mean: 2, flatten: 2
    assert oracular_s(graph, costs) <= vdnn(graph, costs, offload="none", algorithms="p").step_s


def test_average_memory_is_weighted_by_time():
    graph = library_view(chain(layers=2))
    costs = costs_of(graph)
    run = simulate(graph, plain(graph, costs), costs)
    assert average_bytes(run) == pytest.approx(sum(run.memory_bytes) / len(graph.tasks))
    assert average_bytes(run) < run.peak_bytes
