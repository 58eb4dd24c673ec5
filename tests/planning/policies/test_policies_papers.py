"""Checkpoints, Gist with a budget, vDNN's baselines, and what holds for every policy."""

import pytest
from hypothesis import given, settings

from bench.papers.baselines import average_bytes, network_wide, oracular_s
from bench.papers.gist_cases import as_csr, gist_with
from bench.papers.library_view import library_view
from gistkit.ir.plan import Plan
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.checkpoint import checkpoint, cuts
from gistkit.planning.policies.registry import POLICIES, plain
from gistkit.planning.policies.vdnn import vdnn
from gistkit.planning.simulate.simulator import simulate
from tests.support.paper_costs import WORKSPACE, costs_of
from tests.support.step_graphs import chain, pooled, step_graphs

OURS = ("plain", "gist", "vdnn-all", "vdnn-conv", "vdnn-dyn", "cdma", "checkpoint")


@settings(deadline=None, max_examples=10, derandomize=True)
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


def test_gists_encodings_one_by_one():
    graph = library_view(pooled(size=64), maps=True)
    costs = cost_table(graph, hardware("titanx"), density=0.2)
    kept = {}
    for encodings in ((), ("binarize",), ("ssdc",), ("binarize", "ssdc")):
        plan = gist_with(graph, costs, encodings)
        codecs = {d.codec for d in plan.decisions} - {"dense"}
        assert all(c.startswith(("zvc", "csr")) for c in codecs) == ("binarize" not in encodings), codecs
        kept[encodings] = plan.kept_bytes
    assert any(d.codec == "csr+fp8" for d in as_csr(gist_with(graph, costs, ("ssdc", "dpr"), "fp8")).decisions)
    both = kept["binarize", "ssdc"]
    assert both < min(kept["binarize",], kept["ssdc",]) <= max(kept["binarize",], kept["ssdc",]) < kept[()]


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
