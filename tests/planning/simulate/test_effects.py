"""What decisions do, one at a time, against intervals worked out by hand from docs/planner.md's semantics."""

from dataclasses import replace

from hypothesis import given, settings

from gistkit.ir.plan import Decision
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.gist_rules import gist
from gistkit.planning.simulate.effects import Context, StepIndex, block_effects
from gistkit.planning.simulate.simulator import Simulator
from tests.support.effect_cases import BYTES, CHAIN, CPU, RELU, TITANX, block_of, effects, lives, plan_of, short
from tests.support.step_graphs import chain, step_graphs


def test_value_codec_on_the_device():
    made = effects(CHAIN, RELU, Decision(RELU.storage, "zvc"))
    payload = cost_table(CHAIN, CPU).payload_bytes("zvc", BYTES, "float32", 0.5)
    assert short(made) == [(1, 2, BYTES, "dense"), (1, 9, payload, "payload"), (7, 7, BYTES, "decoded")]
    costs = cost_table(CHAIN, CPU, density=0.5)
    args = ("zvc", BYTES, "float32", 0.5)
    seconds = [(1, costs.encode_s(*args)), (7, costs.decode_s(*args)), (9, costs.relu_backward_s(*args))]
    assert list(made.extra_s) == seconds and made.transfers == ()


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


@given(step_graphs(8))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_effects_of_single_blocks_add_up_to_the_profile(graph):
    """Without rebuilds a plan's memory is the sum of its decisions', each taken alone."""
    costs = cost_table(graph, CPU)
    plan = replace(gist(graph), choices=())
    plan = replace(plan, decisions=tuple(d for d in plan.decisions if d.codec != "rebuild"))
    by_storage, context = {d.storage: d for d in plan.decisions}, Context(StepIndex(graph))
    taken = ((b, by_storage.get(b.storage) if b.storage >= 0 else None) for b in graph.blocks)
    alone = [i for b, d in taken for i in block_effects(graph, costs, d, b, context).intervals]
    together = [i for i in Simulator(graph, costs).profile(plan).intervals if i.block >= 0]
    assert sorted(alone) == sorted(together)
