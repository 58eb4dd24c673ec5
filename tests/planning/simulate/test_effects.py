"""What decisions do, one at a time, against intervals worked out by hand; which plans are refused."""

from dataclasses import replace

import pytest
from hypothesis import given

from gistkit.errors import GistError, PlanError
from gistkit.ir.plan import Decision, Plan
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.gist_rules import gist
from gistkit.planning.simulate.simulator import Context, Simulator, StepIndex, block_effects
from tests.support.step_graphs import chain, step_graphs

CPU, TITANX = hardware("cpu"), hardware("titanx")


def plan_of(graph, *decisions):
    return Plan("test", graph.fingerprint, decisions, ())


def lives(graph, plan, hw):
    """{(block, what): [(first, last, bytes)]} of a plan."""
    found = {}
    for i in Simulator(graph, cost_table(graph, hw, density=0.5)).profile(plan).intervals:
        found.setdefault((i.block, i.what), []).append((i.first, i.last, i.nbytes))
    return found


def effects(decision, hw):
    """Of one decision for the first ReLU's output, where all that may hold zeros is encoded too."""
    costs, index = cost_table(CHAIN, hw, density=0.5), StepIndex(CHAIN)
    saved = (index.by_storage[s].saved for s in costs.densities if s in index.by_storage)
    context = Context(index, encodings=tuple(sorted(t for t in saved if t >= 0)))
    return block_effects(CHAIN, costs, decision, RELU, context)


def short(made):
    return [(i.first, i.last, i.nbytes, i.what) for i in made.intervals]


def block_of(graph, op, nth=0):
    """The block that the nth call of an op made."""
    call = [c for c in graph.calls if c.op == op][nth]
    return next(b for b in graph.blocks if b.storage == call.writes[0])


# chain(): tasks 0 conv, 1 relu, 2 conv, 3 relu, 4 mean | 5 mean, 6 relu, 7 conv w, 8 conv i, 9 relu, 10 conv w
CHAIN = chain(2)
RELU = block_of(CHAIN, "relu")
BYTES = RELU.nbytes


def test_value_codec_on_the_device():
    made = effects(Decision(RELU.storage, "zvc"), CPU)
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
    assert found[last.id, "scratch"] == [(last.saved, last.uses[-1].task, scratch)]
    assert (last.id, "payload") not in found
    alone = lives(graph, plan_of(graph, every[0]), TITANX)
    assert alone[block.id, "scratch"] == [(1, end, scratch)]
    assert (block.id, "scratch") not in lives(graph, plan_of(graph, *every), CPU)


@given(step_graphs(8))
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


def host(**fields):
    return Decision(RELU.storage, "dense", "host", **{"release": 4, "prefetch": 6, **fields})


def test_host_leaves_and_comes_back():
    made = effects(host(), TITANX)
    assert short(made) == [(1, 3, BYTES, "dense"), (6, 9, BYTES, "dense")]
    assert [t[1:] for t in made.transfers] == [(BYTES, "d2h", 2, 4), (BYTES, "h2d", 6, 7)]
    made = effects(host(offload=3, ready=6), TITANX)
    assert [t[3:] for t in made.transfers] == [(3, 4), (6, 6)]


def test_sparse_for_the_host_is_a_scratch_until_it_has_left():
    """What crosses the link is the exact payload, whose runs come back aligned."""
    costs = cost_table(CHAIN, replace(TITANX, async_counts=True))
    scratch, packed = (costs.payload_bytes("zvc", BYTES, "float32", d) for d in (None, 0.5))
    made = effects(replace(host(), codec="zvc"), costs.hardware)
    assert packed < scratch
    assert short(made) == [
        (1, 2, BYTES, "dense"),
        (1, 3, scratch, "scratch"),
        (6, 9, packed + 1536, "payload"),
        (7, 7, BYTES, "decoded"),
    ]


SECOND = block_of(CHAIN, "relu", 1).storage


def refused(*decisions, text, hw=TITANX):
    with pytest.raises(PlanError, match=text) as caught:
        Simulator(CHAIN, cost_table(CHAIN, hw)).profile(plan_of(CHAIN, *decisions))
    return caught.value


@pytest.mark.parametrize(
    ("decision", "text"),
    [
        (host(release=2), r"must leave behind task 2 and be back before task 7, its first use in .*, release 2, pre"),
        (host(prefetch=8), r"be back before task 7, .* got offload -1, release 4, prefetch 8, ready -1; move it there"),
        *((points, "must leave behind task 2") for points in (host(prefetch=3), host(ready=8), host(offload=5))),
        (Decision(SECOND, "dense", "host", release=8, prefetch=9), "task 6, its first use"),
        (Decision(RELU.storage, "drop"), r"'drop' on device: task 7 needs its values, which are not kept; keep them"),
        (Decision(RELU.storage, "mask1"), r"'mask1' on device: task 7 needs its values"),
        (Decision(RELU.storage, "fp8"), r"'fp8' on device: task 9 needs its signs, of which narrow .* add mask=True"),
        (Decision(RELU.storage, "rebuild", "nowhere", sources=(RELU.storage,)), r"rebuilt from itself through"),
        (Decision(99, "dense"), r"decision for storage 99: the step knows no such storage"),
        (Decision(block_of(CHAIN, "conv2d").storage, "zvc"), r"backward keeps nothing of this activation; leave it"),
    ],
)
def test_decisions_that_make_no_sense(decision, text):
    error = refused(decision, text=text)
    assert f"storage {decision.storage}" in str(error)
    assert isinstance(error, ValueError) and isinstance(error, GistError)


def test_plans_that_contradict_themselves():
    refused(host(), text="cpu has no link; keep it on the device", hw=CPU)
    twice = Decision(RELU.storage, "zvc"), Decision(RELU.storage, "dense")
    refused(*twice, text="one decision a storage, got two")
    text = f"storage {RELU.storage} is rebuilt from storage {SECOND}, whose values 'mask1' does not keep"
    refused(Decision(RELU.storage, "rebuild", sources=(SECOND,)), Decision(SECOND, "mask1"), text=text)
    with pytest.raises(PlanError, match="got one without; capture it with backward=True"):
        costs = replace(cost_table(CHAIN, CPU), algorithms=())
        Simulator(replace(CHAIN, tasks=(), blocks=()), costs).profile(plan_of(CHAIN))
