"""What decisions do, one at a time, against intervals worked out by hand from docs/planner.md's semantics."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from gistkit.ir.plan import CallChoice, Decision
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.gist_rules import gist
from gistkit.planning.simulate.effects import Composer, Context, StepIndex, block_effects, profile
from tests.support.effect_cases import BYTES, CHAIN, CPU, RELU, TITANX, block_of, effects, lives, plan_of, short
from tests.support.step_graphs import chain, forked, pooled, step_graphs


def test_dense_lives_to_its_last_use():
    for decision in (None, Decision(RELU.storage, "dense")):
        assert short(effects(CHAIN, RELU, decision)) == [(1, 9, BYTES, "dense")]


def test_plain_holds_what_its_own_operators_hold():
    graph = pooled()
    by_plan = {p: lives(graph, plan_of(graph, policy=p)) for p in ("plain", "test")}
    pool_input, image = block_of(graph, "relu", 1), next(b for b in graph.blocks if b.kind == "input")
    pooling = next(t.index for t in reversed(graph.tasks) if t.op == "max_pool2d" and t.phase == "backward")
    own = pool_input.uses[-1].task
    assert pool_input.holder == own > pooling
    conv = block_of(graph, "relu", 0)
    weight = conv.uses[0].task
    assert graph.tasks[weight + 1].part == "input"
    for name, until in (("plain", weight + 1), ("test", weight)):
        held = replace(conv, uses=conv.uses[:1], holder=weight)
        context = Context(StepIndex(graph), plain=name == "plain")
        costs = cost_table(graph, CPU)
        assert block_effects(graph, costs, None, held, context).intervals[0].last == until
    assert by_plan["plain"][image.id, "static"] == by_plan["test"][image.id, "static"]


def test_value_codec_on_the_device():
    made = effects(CHAIN, RELU, Decision(RELU.storage, "zvc"))
    payload = cost_table(CHAIN, CPU).payload_bytes("zvc", BYTES, "float32", 0.5)
    assert short(made) == [(1, 2, BYTES, "dense"), (1, 9, payload, "payload"), (7, 7, BYTES, "decoded")]
    costs = cost_table(CHAIN, CPU, density=0.5)
    args = ("zvc", BYTES, "float32", 0.5)
    seconds = [(1, costs.encode_s(*args)), (7, costs.decode_s(*args)), (9, costs.relu_backward_s(*args))]
    assert list(made.extra_s) == seconds and made.transfers == ()


def test_mask_beside_a_narrow_form():
    made = effects(CHAIN, RELU, Decision(RELU.storage, "fp8", mask=True))
    assert short(made) == [
        (1, 2, BYTES, "dense"),
        (1, 9, BYTES // 32, "mask"),
        (1, 7, BYTES // 4, "payload"),
        (7, 7, BYTES, "decoded"),
    ]


def test_scratch_of_a_size_that_only_the_device_knows():
    graph = chain(7)
    costs = cost_table(graph, TITANX, density=0.5)
    block = block_of(graph, "relu")
    scratch = costs.payload_bytes("zvc", BYTES, "float32", None)
    payload = costs.payload_bytes("zvc", BYTES, "float32", 0.5)
    relus = [b for b in graph.blocks if b.storage in {c.writes[0] for c in graph.calls if c.op == "relu"}]
    every = [Decision(b.storage, "zvc") for b in relus[:-1]]
    found = lives(graph, plan_of(graph, *every), TITANX)
    fourth, end = relus[4].saved, block.uses[-1].task
    assert found[block.id, "scratch"] == [(1, fourth, scratch)]
    assert found[block.id, "payload"] == [(fourth, end, payload)]
    last = relus[-2]
    assert (
        found[last.id, "scratch"] == [(last.saved, last.uses[-1].task, scratch)] and (last.id, "payload") not in found
    )
    alone = lives(graph, plan_of(graph, every[0]), TITANX)
    assert alone[block.id, "scratch"] == [(1, end, scratch)]
    assert (block.id, "scratch") not in lives(graph, plan_of(graph, *every), CPU)


def test_maps_that_their_operator_makes_have_no_dense_form():
    graph = pooled()
    index, mask = block_of(graph, "max_pool2d", 0, 1), block_of(graph, "dropout", 0, 1)
    assert index.dtype == "int64"
    made = effects(graph, index, Decision(index.storage, "argmax4"))
    assert short(made) == [(index.first, index.uses[-1].task, index.nbytes // 16, "payload")]
    made = effects(graph, mask, Decision(mask.storage, "bits"))
    noise = (mask.first, mask.first, mask.nbytes, "scratch")
    assert short(made) == [(mask.first, mask.uses[-1].task, mask.nbytes // 32, "payload"), noise]


def test_binarized_and_dropped():
    graph = chain(1)
    relu = block_of(graph, "relu")
    made = effects(graph, relu, Decision(relu.storage, "mask1"))
    use = relu.uses[0].task
    assert short(made) == [(1, relu.last, BYTES, "dense"), (1, use, BYTES // 32, "payload")]
    assert [t for t, _ in made.extra_s] == [1, use]
    assert short(effects(graph, relu, Decision(relu.storage, "drop"))) == [(1, relu.last, BYTES, "dense")]


def test_rebuild_keeps_its_sources_until_it_is_needed():
    graph = forked(1)
    rebuilt = block_of(graph, "batch_norm", 0)
    source = block_of(graph, "conv2d", 0)
    relu = next(c for c in graph.calls if c.op == "relu")
    assert graph.calls[relu.index - 1].op == "batch_norm" and source.saved == relu.index - 1
    decision = Decision(
        rebuilt.storage, "rebuild", "nowhere", True, (source.storage,), recipe=("relu", ("bn", relu.covered - 1))
    )
    conv, own = (u.task for u in rebuilt.uses)
    found = lives(graph, plan_of(graph, decision, Decision(source.storage, "fp16")))
    assert found[rebuilt.id, "dense"] == [(rebuilt.first, rebuilt.last, BYTES)]
    assert found[rebuilt.id, "decoded"] == [(conv, conv, BYTES)]
    assert found[rebuilt.id, "mask"] == [(rebuilt.saved, own, BYTES // 32)]
    bn = source.uses[0].task
    assert found[source.id, "decoded"] == [(conv, conv, BYTES), (bn, bn, BYTES)]
    early = replace(source, uses=(), holder=-1)
    moved = replace(graph, blocks=tuple(early if b.id == source.id else b for b in graph.blocks))
    assert lives(moved, plan_of(moved, decision))[source.id, "dense"] == [(0, conv, BYTES)]
    costs = cost_table(graph, CPU)
    extra = profile(graph, plan_of(graph, decision), costs).extra_s
    assert extra[conv] == pytest.approx(costs.copy_s(4 * BYTES) + costs.copy_s(0))  # two kernels, four passes


def test_slices_hold_two_at_a_time_and_one_more_gradient():
    graph = chain(2, batch=8)
    relu = block_of(graph, "relu")
    second = [c for c in graph.calls if c.op == "conv2d"][1]
    cut = CallChoice(second.covered, "conv2d", weight_grad_slices=4)
    found = lives(graph, plan_of(graph, Decision(relu.storage, "fp16", mask=True), choices=(cut,)))
    assert found[relu.id, "decoded"] == [(7, 7, relu.nbytes // 2)]
    gradients = sum(graph.blocks[b].nbytes for b in graph.tasks[7].writes)
    assert (7, 7, gradients) in found[-1, "transient"]
    many = CallChoice(second.covered, "conv2d", weight_grad_slices=64)
    found = lives(graph, plan_of(graph, Decision(relu.storage, "fp16", mask=True), choices=(many,)))
    assert found[relu.id, "decoded"] == [(7, 7, relu.nbytes // 4)]  # no more slices than rows


def test_what_a_rebuild_reads_in_slices_is_there_one_at_a_time():
    graph = forked(1)
    rebuilt, source = block_of(graph, "batch_norm", 0), block_of(graph, "conv2d", 0)
    relu = next(c for c in graph.calls if c.op == "relu")
    recipe = ("relu", ("bn", relu.covered - 1))
    decisions = (
        Decision(rebuilt.storage, "rebuild", "nowhere", True, (source.storage,), recipe=recipe),
        Decision(source.storage, "fp16"),
    )
    conv, bn = rebuilt.uses[0].task, source.uses[0].task
    call = graph.calls[graph.tasks[conv].call]
    cut = plan_of(graph, *decisions, choices=(CallChoice(call.covered, "conv2d", weight_grad_slices=2),))
    composer = Composer(graph, cost_table(graph, CPU))

    def decoded(plan, block):
        found = (i for i in composer.profile(plan).intervals if i.block == block.id and i.what == "decoded")
        return sorted((i.first, i.nbytes) for i in found)

    # a slice beside the one that was read last; of the source no more than the slice that it is made of
    assert decoded(cut, rebuilt) == [(conv, BYTES)]
    assert decoded(cut, source) == [(conv, BYTES // 2), (bn, BYTES)]
    # the same composer on the same decisions without the cut
    assert decoded(plan_of(graph, *decisions), source) == [(conv, BYTES), (bn, BYTES)]


def test_relu_whose_mask_the_map_carries_hands_its_gradient_on():
    graph = chain(1)
    call = next(c for c in graph.calls if c.op == "relu")
    task = next(t for t in graph.tasks if t.phase == "backward" and t.op == "relu")
    made = graph.blocks[task.writes[0]]
    costs = cost_table(graph, CPU)
    done = profile(graph, plan_of(graph, choices=(CallChoice(call.covered, "relu", mask_in_pool=True),)), costs)
    assert [(i.first, i.last) for i in done.intervals if i.block == made.id] == [(task.index + 1, made.last)]
    assert done.extra_s[task.index] == -costs.task_s(task.index)


def test_recomputed_segment():
    graph = chain(4)
    relus = [block_of(graph, "relu", i) for i in range(4)]
    source, again = relus[0], relus[1:3]
    decisions = [Decision(b.storage, "recompute", "nowhere", sources=(source.storage,)) for b in again]
    costs = cost_table(graph, CPU)
    done = profile(graph, plan_of(graph, *decisions, policy="checkpoint"), costs)
    start = min(u.task for b in again for u in b.uses)
    found = lives(graph, plan_of(graph, *decisions, policy="checkpoint"))
    for block in again:
        assert found[block.id, "dense"] == [(block.first, block.last, BYTES)]
        assert found[block.id, "decoded"] == [(start, block.uses[-1].task, BYTES)]
    tasks = [2, 3, 4, 5]  # conv, relu, conv, relu
    assert done.extra_s[start] == pytest.approx(sum(costs.task_s(t) for t in tasks))
    assert sum(done.extra_s) == done.extra_s[start]
    # a convolution's output is there while its ReLU runs, before task `start` makes anything
    made = sum(b.nbytes for b in graph.blocks if b.first == start) + graph.tasks[start].transient_bytes
    assert (start, start, BYTES - made) in found[-1, "transient"]
    assert found[source.id, "dense"] == [(1, source.uses[-1].task, BYTES)]


@given(step_graphs(8))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_effects_of_single_blocks_add_up_to_the_profile(graph):
    """Without slices and rebuilds a plan's memory is the sum of its decisions', each taken alone."""
    costs = cost_table(graph, CPU)
    plan = replace(gist(graph), choices=())
    plan = replace(plan, decisions=tuple(d for d in plan.decisions if d.codec != "rebuild"))
    by_storage, context = {d.storage: d for d in plan.decisions}, Context(StepIndex(graph))
    taken = ((b, by_storage.get(b.storage) if b.storage >= 0 else None) for b in graph.blocks)
    alone = [i for b, d in taken for i in block_effects(graph, costs, d, b, context).intervals]
    together = [i for i in profile(graph, plan, costs).intervals if i.block >= 0]
    assert sorted(alone) == sorted(together)
