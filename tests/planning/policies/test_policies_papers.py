"""Checkpoints, Gist with a budget, vDNN's baselines, cDMA, allocators, and what holds for every policy."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gistkit
from bench.papers.algorithms import paper_algorithms
from bench.papers.allocators import dynamic_bytes, feature_maps, investigation_bytes, static_sharing, turn_of
from bench.papers.baselines import average_bytes, network_wide, oracular_s
from bench.papers.cdma import with_engine, zvc_ratio
from bench.papers.gist_cases import as_csr, gist_with
from bench.papers.library_view import library_view
from gistkit.ir.plan import Plan
from gistkit.ir.tasks import Block
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.checkpoint import checkpoint, cuts
from gistkit.planning.policies.gist_rules import gist
from gistkit.planning.policies.registry import POLICIES, plain
from gistkit.planning.policies.vdnn import cdma, round_trip_s, vdnn, vdnn_all
from gistkit.planning.simulate.intervals import Interval
from gistkit.planning.simulate.simulator import Simulator, simulate
from tests.support.paper_costs import WORKSPACE, costs_of, device
from tests.support.step_graphs import chain, pooled, step_graphs

OURS = ("plain", "gist", "vdnn-all", "vdnn-conv", "vdnn-dyn", "cdma", "checkpoint")
MIB = 2**20
MB = 10**6


@settings(max_examples=10)
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


class Biased(nn.Module):
    """Layers that read a mask of the tokens and a bias by position, made once, as the blocks of transformers do."""

    def __init__(self, shared):
        super().__init__()
        self.shared, self.tokens, self.places = shared, nn.Embedding(50, 64), nn.Embedding(8, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, ids):
        mask, bias, x = ids.ge(1)[..., None], torch.tanh(self.places(torch.arange(8))), self.tokens(ids)
        for layer in self.layers:
            x = torch.tanh(torch.tanh(layer(x)).where(mask, 0) + bias) if self.shared else torch.tanh(layer(x))
        return x.sum()


def test_masks_and_biases_by_position_cross_no_cut():
    """What does not come of both inputs and parameters is there, or made anew, in each segment. Seen are 0.64 and
    0.65 of plain's peak; were they to cross, there would be nothing to cut, and checkpoints take plain's."""
    found = []
    for shared in (False, True):
        graph = gistkit.capture(Biased(shared), (torch.ones(64, 8).long(),), backward=True)
        costs = costs_of(graph)
        found.append(checkpoint(graph, costs).peak_bytes / plain(graph, costs).peak_bytes)
        assert len(cuts(graph)) >= 2 * 8
    assert 0.5 < found[1] < found[0] < 0.7, found


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


def hosted(plan):
    return {d.storage: d for d in plan.decisions if d.place == "host"}


@pytest.mark.parametrize(
    ("density", "dtype", "ratio"),
    ((0.0, "float32", 32), (1.0, "float32", 32 / 33), (0.5, "float32", 32 / 17), (0.5, "bfloat16", 16 / 9)),
)
def test_ratio_of_a_32_bit_mask_a_window(density, dtype, ratio):
    assert zvc_ratio(density, dtype) == pytest.approx(ratio)


def test_compression_pays_where_the_link_is_not_hidden():
    """32 MiB over 1 GB/s take 33.6 ms each way; a quarter of it non-zero leaves about 9.5 ms."""
    block = Block(0, "activation", 32 * MIB, 0, 0, 0, saved=0)
    costs = costs_of(chain(layers=1), device(link_gbps=1.0))
    hidden = [round_trip_s(block, costs, d, out_s=1.0, back_s=1.0) for d in (None, 0.25)]
    assert hidden[0] == 0.0 < hidden[1]  # encoding alone is left
    exposed = [round_trip_s(block, costs, d, out_s=0.0, back_s=0.0) for d in (None, 0.25)]
    assert exposed[0] == pytest.approx(2 * 32 * MIB / 1e9)
    assert exposed[1] < exposed[0] / 3


def test_each_tensor_is_decided_by_itself():
    """Densities of 0.1 and 1: only the first is worth it; without a density nothing is known of zeros."""
    graph = library_view(chain(layers=4))
    sent = hosted(vdnn_all(graph, costs_of(graph)))
    first, second, *_ = (s for s in sent if graph.storages[s].kind == "activation")
    slow = device(link_gbps=1e-6)
    plan = cdma(graph, costs_of(graph, slow, {first: 0.1, second: 1.0}))
    codecs = {s: d.codec for s, d in hosted(plan).items()}
    assert codecs.pop(first) == "zvc" and set(codecs.values()) == {"dense"}
    assert codecs.keys() | {first} == sent.keys()


def test_cdma_keeps_vdnns_schedule_and_moves_fewer_bytes_in_less_time():
    graph = library_view(chain(layers=4, size=64, channels=16))
    costs = cost_table(graph, replace(hardware("titanx"), launch_s=0.0), density=0.2, ways=paper_algorithms)
    raw = vdnn_all(graph, costs, algorithms="p")
    on = with_engine(costs)
    packed = cdma(graph, on)
    for storage, decision in hosted(packed).items():
        assert replace(decision, codec="dense", reason="") == replace(hosted(raw)[storage], reason="")
    less, more = simulate(graph, packed, on), simulate(graph, raw, on)
    assert less.d2h_bytes < more.d2h_bytes and packed.step_s < raw.step_s
    assert packed.step_s == less.step_s
    software = cdma(graph, costs)
    assert packed.step_s <= software.step_s


def life(first, last, megabytes, block=0, what="dense"):
    return Interval(first, last, megabytes * MB, block, what)


def test_gist_figure_7():
    """Section IV-C: X is stashed, A to D are consumed at once, one after the other; SSDC encodes X."""
    consumed = [life(1, 1, 8, 1), life(2, 3, 6, 2), life(4, 5, 4, 3), life(6, 6, 7, 4)]
    baseline = static_sharing([life(0, 7, 10), *consumed])
    assert baseline.total_bytes == 18 * MB
    assert [[i.block for i in group] for group in baseline.groups] == [[0], [1, 4, 2, 3]]
    encoded = static_sharing([life(0, 0, 10), life(0, 7, 2, what="payload"), life(7, 7, 10), *consumed])
    assert encoded.total_bytes == 12 * MB
    assert [group[0].nbytes for group in encoded.groups] == [10 * MB, 2 * MB]


def test_investigation_baseline_shares_no_stashed_maps():
    stashed = [life(0, 9, 3, 0), life(1, 5, 2, 1)]
    consumed = [life(2, 2, 5, 2), life(7, 8, 4, 3), life(8, 9, 1, 4)]
    assert investigation_bytes([*stashed, *consumed], turn=5) == (3 + 2 + 5 + 1) * MB
    assert static_sharing([*stashed, *consumed]).total_bytes == (5 + 3 + 2) * MB
    assert dynamic_bytes([*stashed, *consumed]) == 10 * MB


LIVES = st.lists(
    st.tuples(st.integers(-1, 12), st.integers(0, 8), st.integers(1, 20)).map(
        lambda t: Interval(t[0], t[0] + t[1], t[2], 0, "dense")
    ),
    max_size=14,
)


@given(LIVES)
def test_laws_of_sharing(lives):
    shared = static_sharing(lives)
    assert sorted(i for g in shared.groups for i in g) == sorted(lives)
    for group in shared.groups:
        ordered = sorted(group)
        assert all(a.last < b.first for a, b in pairwise(ordered))
        assert group[0].nbytes == max(i.nbytes for i in group)
    peak = max((sum(i.nbytes for i in lives if i.first <= t <= i.last) for t in range(-1, 22)), default=0)
    assert dynamic_bytes(lives) == peak <= shared.total_bytes <= investigation_bytes(lives, turn=5)


def test_gist_shrinks_what_is_shared():
    graph = pooled(channels=8)
    costs = cost_table(graph, hardware("cpu"))
    plain = feature_maps(graph, Simulator(graph, costs).profile(Plan("plain", graph.fingerprint, (), ())))
    coded = feature_maps(graph, Simulator(graph, costs).profile(gist(graph)))
    kinds = {graph.blocks[i.block].kind for i in plain}
    assert kinds == {"activation", "gradient"}
    turn = turn_of(graph)
    assert graph.tasks[turn].phase == "backward" and graph.tasks[turn - 1].phase == "forward"
    for lives in (plain, coded):
        assert dynamic_bytes(lives) <= static_sharing(lives).total_bytes <= investigation_bytes(lives, turn)
    assert static_sharing(coded).total_bytes < static_sharing(plain).total_bytes
    assert investigation_bytes(coded, turn) < investigation_bytes(plain, turn)
