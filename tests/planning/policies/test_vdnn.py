"""vDNN's policies against the rules of its paper; rows V1 to V35 of the checklist."""

from dataclasses import replace

import pytest
import torch

from bench.papers.library_view import library_view
from gistkit import zoo
from gistkit.capture.entry import capture
from gistkit.ir.queries import ACTV, CONV, POOL, layers
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies import vdnn
from gistkit.planning.simulate.simulator import Simulator, simulate
from tests.support.paper_costs import WORKSPACE, costs_of, device
from tests.support.step_graphs import Step, chain, pooled


def fork(first, second):
    """conv, relu, then two readers of its output, then their sum."""
    step = Step()
    x = step.relu(step.conv(step.input(3, 16, 16), 4))
    ops = {"conv": lambda: step.conv(x, 4), "relu": lambda: step.relu(x), "norm": lambda: step.batch_norm(x)}
    a = ops[first]()
    b = ops[second]()
    return step.finish(step.add(a, b))


def by_forward(graph):
    return {layer.forward: layer for layer in layers(graph)}


def sent_by(graph, which="all"):
    """(block, layer that offloads it, decision) of everything that is sent."""
    blocks, owners = {b.storage: b for b in graph.blocks}, by_forward(graph)
    return [(blocks[d.storage], owners[d.offload], d) for d in vdnn.offloads(graph, which)]


def test_only_the_last_consumer_offloads():
    graph = fork("conv", "conv")
    block, _, shared = next(sent for sent in sent_by(graph) if sent[0].name == "activation4")
    readers = [t.index for t in graph.tasks[:6] if block.id in t.reads]
    assert len(readers) == 2
    assert (shared.offload, shared.release) == (readers[1], readers[1] + 1)
    # whose last consumer is no CONV: it stays with vDNN_conv
    graph = fork("conv", "norm")
    names = [{block.name for block, _, _ in sent_by(graph, which)} for which in ("all", "conv")]
    assert "activation4" in names[0] - names[1]


def test_activations_never_offload():
    for graph in (fork("conv", "relu"), library_view(pooled()), chain()):
        kinds = {owner.kind for _, owner, _ in sent_by(graph)}
        assert kinds and ACTV not in kinds
    assert "activation4" not in {block.name for block, _, _ in sent_by(fork("conv", "relu"))}


def test_the_classifier_keeps_its_x():
    graph = library_view(pooled())
    linear = next(layer for layer in layers(graph) if layer.kind == "FC")
    assert not linear.features and set(linear.x).isdisjoint({block.id for block, _, _ in sent_by(graph)})


def test_vdnn_conv_takes_the_convolutions_alone():
    graph = library_view(pooled())
    kinds = {which: {owner.kind for _, owner, _ in sent_by(graph, which)} for which in ("conv", "all")}
    assert kinds == {"conv": {CONV}, "all": {CONV, "POOL", "DROPOUT"}}
    assert vdnn.offloads(graph, "none") == ()


def test_the_next_layer_waits_for_the_offload_and_only_where_there_is_one():
    """X of the second convolution is 8192 bytes: 2 s at 4096 B/s, its forward 1 s. The layer behind starts 1 s late."""
    graph = library_view(chain(layers=2))
    costs = costs_of(graph, device(link_gbps=4096e-9))
    plan = vdnn.vdnn_conv(graph, costs)
    run = simulate(graph, plan, costs)
    sent = {o.offload: o for o in vdnn.offloads(graph, "conv")}
    second = by_forward(graph)[2]
    assert second.kind == CONV and sent[2].release == 3
    assert run.start_s[3] - run.start_s[2] == pytest.approx(2.0)
    assert run.start_s[2] - run.start_s[1] == pytest.approx(1.0)
    transfer = next(t for t in Simulator(graph, costs).profile(plan).transfers if t.direction == "d2h" and t.issue == 2)
    assert (transfer.due, transfer.nbytes) == (3, 8192)


def test_an_offloaded_x_is_gone_before_the_next_layer():
    graph = library_view(chain(layers=3))
    costs = costs_of(graph)
    kept, sent = (simulate(graph, vdnn.vdnn(graph, costs, offload=w), costs).memory_bytes for w in ("none", "all"))
    away = [(block.nbytes, o) for block, _, o in sent_by(graph) if o.release < o.prefetch]
    assert len(away) == 4
    for _, o in away:
        gone = sum(nbytes for nbytes, p in away if p.release <= o.release < p.prefetch)
        assert kept[o.release] - sent[o.release] == gone


def test_a_prefetch_overlaps_a_later_layer_and_is_ready_before_the_next():
    """Bytes at 2048 B/s: 4 s under a layer of 1 or 2 s, so the layer after it waits although it does not read X yet."""
    graph = library_view(chain(layers=3))
    costs = costs_of(graph, device(link_gbps=2048e-9))
    run = simulate(graph, vdnn.vdnn_all(graph, costs), costs)
    ahead = [sent for sent in sent_by(graph) if sent[2].prefetch < sent[0].uses[0].task]
    assert len(ahead) == 3
    for block, owner, o in ahead:
        during = next(layer for layer in layers(graph) if layer.backward[:1] == (o.prefetch,))
        assert during.index > owner.index and o.ready == during.backward[-1] + 1
        assert run.start_s[o.ready] - run.start_s[o.prefetch] >= block.nbytes / 2048 - 1e-9


def test_copies_on_demand_start_at_their_use_and_cost_more():
    """III-A's naive way back, as vDNN's plan with every fetch at its use."""
    graph = library_view(chain(layers=4))
    costs = costs_of(graph, device(link_gbps=8192e-9))
    ahead, uses = vdnn.vdnn_all(graph, costs), {b.storage: b.uses[0].task for b in graph.blocks if b.uses}
    on_demand = (
        replace(d, prefetch=uses[d.storage], ready=uses[d.storage]) if d.on_host else d for d in ahead.decisions
    )
    late = simulate(graph, replace(ahead, decisions=tuple(on_demand)), costs)
    assert late.step_s > ahead.step_s
    assert late.peak_bytes <= ahead.peak_bytes


def test_algorithms_m_and_p():
    graph = library_view(chain(layers=2))
    costs = costs_of(graph, workspace=WORKSPACE)
    small, fast = vdnn.vdnn_all(graph, costs, algorithms="m"), vdnn.vdnn_all(graph, costs, algorithms="p")
    assert {c.algorithm for c in small.choices} == {"implicit_gemm"}
    assert {c.algorithm for c in fast.choices} == {"winograd"}
    assert small.peak_bytes < fast.peak_bytes and small.step_s > fast.step_s


def dynamic():
    """A network whose late convolutions want workspace, with the peaks of vDNN_dyn's configurations."""
    step = Step()
    x = step.max_pool(step.relu(step.conv(step.input(3, 16, 16), 4)))
    for _ in range(3):
        x = step.relu(step.conv(x, 32, 1))
    graph = library_view(step.finish(x))
    costs = costs_of(graph, workspace=WORKSPACE, largest=8)
    peak = {
        (offload, which): vdnn.vdnn(graph, costs, offload=offload, algorithms=which).peak_bytes
        for offload in ("none", "conv", "all")
        for which in ("m", "p")
    }
    assert peak["all", "m"] < peak["conv", "m"] < peak["all", "p"] < peak["conv", "p"] < peak["none", "p"]
    return graph, costs, peak


@pytest.mark.parametrize("offload", ("none", "conv", "all"))
def test_dyn_phase_2_takes_the_first_that_fits_with_the_fastest_algorithms(offload):
    graph, costs, peak = dynamic()
    plan = vdnn.vdnn_dyn(graph, costs, peak[offload, "p"])
    assert (plan.details["offload"], plan.details["phase"]) == (offload, 2)
    assert {c.algorithm for c in plan.choices} == {"winograd"}
    assert plan.details["trainable"] and plan.policy == "vdnn-dyn"


def test_dyn_phase_3_downgrades_each_layer_no_further_than_it_must():
    graph, costs, peak = dynamic()
    budget = peak["all", "p"] - 1
    plan = vdnn.vdnn_dyn(graph, costs, budget)
    assert plan.details["phase"] == 3 and plan.peak_bytes <= budget
    used = [c.algorithm for c in plan.choices]
    assert "winograd" in used and used != ["winograd"] * len(used)
    faster = {"implicit_gemm": "precomp", "precomp": "winograd"}
    calls = {c.covered: c.index for c in graph.calls if c.covered >= 0}
    chosen = {calls[c.covered]: c.algorithm for c in plan.choices}
    for call, name in chosen.items():
        if name in faster:
            tried = {**chosen, call: faster[name]}
            assert vdnn.vdnn(graph, costs, offload=plan.details["offload"], algorithms=tried).peak_bytes > budget


def test_dyn_phase_3_tries_vdnn_conv_before_vdnn_all():
    graph, costs, peak = dynamic()
    assert vdnn.vdnn_dyn(graph, costs, peak["conv", "m"]).details["offload"] == "conv"
    below = vdnn.vdnn_dyn(graph, costs, peak["conv", "m"] - 1)
    assert (below.details["offload"], below.details["phase"]) == ("all", 3)
    least = vdnn.vdnn_dyn(graph, costs, peak["all", "m"])
    assert (least.details["offload"], least.details["phase"], least.peak_bytes) == ("all", 3, peak["all", "m"])


def test_vgg16_with_256_images_offloads_15_6_gb():
    """vDNN Fig. 12 ("up to 16 GB"). X of 13 CONV and 5 POOL layers is 15,203,328 elements an image; the pooling to 7x7
    that torchvision's VGG has before its classifier adds 25,088, which the paper's has not."""
    with torch.device("meta"):
        model = zoo.vgg16()
    captured = capture(model, (torch.empty(256, 3, 224, 224, device="meta"),), backward=True)
    graph = library_view(captured)
    costs = cost_table(graph, hardware("titanx"))
    run = simulate(graph, vdnn.vdnn_all(graph, costs), costs)
    assert run.d2h_bytes == run.h2d_bytes == 4 * 256 * (15_203_328 + 25_088)
    assert round(run.d2h_bytes / 1e9, 1) == 15.6
    convs = simulate(graph, vdnn.vdnn_conv(graph, costs), costs)
    assert convs.d2h_bytes == sum(
        graph.blocks[b].nbytes for layer in layers(graph) if layer.kind == CONV for b in layer.x
    )


def test_what_has_no_reuse_goes_without_a_transfer():
    step = Step()
    graph = step.finish(step.conv(step.max_pool(step.conv(step.input(3, 16, 16), 4)), 4))
    plan = vdnn.vdnn_all(graph, costs_of(graph))
    pool_x = graph.calls[1].reads[0]
    assert [d.codec for d in plan.decisions if d.storage == pool_x] == ["drop"]


def test_dyn_phase_1_marks_what_cannot_be_trained():
    graph, costs, peak = dynamic()
    plan = vdnn.vdnn_dyn(graph, costs, peak["all", "m"] - 1)
    assert plan.details["phase"] == 1 and not plan.details["trainable"]
    assert plan.peak_bytes == peak["all", "m"]


def kinds(text):
    """Kinds of ``C`` CONV, ``A`` ACTV, ``P`` POOL, and the numbers of those with ``+``, offloaded and not fetched."""
    kinds, waiting = [], set()
    for mark in text:
        if mark == "+":
            waiting.add(len(kinds) - 1)
        else:
            kinds.append({"C": CONV, "A": ACTV, "P": POOL}[mark])
    return kinds, waiting


@pytest.mark.parametrize(
    ("text", "current", "hit"),
    [
        ("C+AC+AP+A", 5, 4),  # the nearest offloaded layer
        ("C+AC+AP+A", 4, 2),  # not the current one
        ("AC+", 1, -1),
        ("C+C+A", 2, 1),  # a CONV that is a hit is returned, not passed
        ("C+APA", 3, 0),  # a layer that is no CONV is passed: it did not offload, or was prefetched already
        ("C+ACA", 3, -1),  # the window ends at a CONV that did not offload, or that was prefetched already
        ("C+A", 0, -1),
        ("AAPA", 3, -1),
    ],
)
def test_the_layer_of_figure_10(text, current, hit):
    assert vdnn.find_prefetch_layer(*kinds(text), current) == hit


@pytest.mark.parametrize(
    ("text", "fetched"),
    [
        # The pool's own X is on demand, the second CONV's comes with the pool. Then the ACTV finds that CONV prefetched
        # and stops, so the first CONV's X waits for the second CONV.
        ("C+AC+AP+", {2: 4, 0: 2}),
        *(("P+CA", {0: 1}), ("P+ACCA", {0: 2}), ("C+", {}), ("C+P+P+A", {2: 3, 1: 2, 0: 1})),
    ],
)
def test_each_layer_is_fetched_once_in_reverse_order_or_on_demand(text, fetched):
    assert vdnn.prefetches(*kinds(text)) == fetched
