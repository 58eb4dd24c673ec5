"""What decisions on the host do, one at a time, and which decisions and plans are refused."""

from dataclasses import replace

import pytest

from gistkit.errors import GistError, PlanError
from gistkit.ir.plan import Decision
from gistkit.planning.cost.table import cost_table
from gistkit.planning.simulate.simulator import Simulator
from tests.support.effect_cases import BYTES, CHAIN, CPU, RELU, TITANX, block_of, effects, plan_of, short


def host(**fields):
    return Decision(RELU.storage, "dense", "host", **{"release": 4, "prefetch": 6, **fields})


def test_host_leaves_and_comes_back():
    made = effects(CHAIN, RELU, host(), TITANX)
    assert short(made) == [(1, 3, BYTES, "dense"), (6, 9, BYTES, "dense")]
    assert [t[1:] for t in made.transfers] == [(BYTES, "d2h", 2, 4), (BYTES, "h2d", 6, 7)]
    made = effects(CHAIN, RELU, host(offload=3, ready=6), TITANX)
    assert [t[3:] for t in made.transfers] == [(3, 4), (6, 6)]


def test_sparse_for_the_host_is_a_scratch_until_it_has_left():
    """What crosses the link is the exact payload: on CUDA the scratch is packed on its way, and comes back packed, its
    runs aligned."""
    costs = cost_table(CHAIN, replace(TITANX, async_counts=True))
    scratch, packed = (costs.payload_bytes("zvc", BYTES, "float32", d) for d in (None, 0.5))
    made = effects(CHAIN, RELU, replace(host(), codec="zvc"), costs.hardware)
    assert packed < scratch
    assert short(made) == [
        (1, 2, BYTES, "dense"),
        (1, 3, scratch, "scratch"),
        (6, 9, packed + 1536, "payload"),
        (7, 7, BYTES, "decoded"),
    ]


@pytest.mark.parametrize(
    ("decision", "text"),
    [
        (host(release=2), r"must leave behind task 2 and be back before task 7, its first use in .*, release 2, pre"),
        (host(prefetch=8), r"be back before task 7, .* got offload -1, release 4, prefetch 8, ready -1; move it there"),
        *((points, "must leave behind task 2") for points in (host(prefetch=3), host(ready=8), host(offload=5))),
        (Decision(RELU.storage, "drop"), r"'drop' on device: task 7 needs its values, which are not kept; keep them"),
        (Decision(RELU.storage, "mask1"), r"'mask1' on device: task 7 needs its values"),
        (Decision(RELU.storage, "fp8"), r"'fp8' on device: task 9 needs its signs, of which narrow .* add mask=True"),
        (Decision(RELU.storage, "rebuild", "nowhere", sources=(RELU.storage,)), r"rebuilt from itself through"),
        (Decision(99, "dense"), r"decision for storage 99: the step knows no such storage"),
        (Decision(block_of(CHAIN, "conv2d").storage, "zvc"), r"backward keeps nothing of this activation; leave it"),
    ],
)  # fmt: skip
def test_decisions_that_make_no_sense(decision, text):
    with pytest.raises(PlanError, match=text) as caught:
        Simulator(CHAIN, cost_table(CHAIN, TITANX)).profile(plan_of(CHAIN, decision))
    assert f"storage {decision.storage}" in str(caught.value)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, GistError)


def test_plans_that_contradict_themselves():
    costs = cost_table(CHAIN, CPU)
    other = block_of(CHAIN, "relu", 1)
    for decisions, text in (
        ((host(),), "cpu has no link; keep it on the device"),
        ((Decision(RELU.storage, "zvc"), Decision(RELU.storage, "dense")), "one decision a storage, got two"),
        (
            (Decision(RELU.storage, "rebuild", sources=(other.storage,)), Decision(other.storage, "mask1")),
            f"storage {RELU.storage} is rebuilt from storage {other.storage}, whose values 'mask1' does not keep",
        ),
        ((Decision(other.storage, "dense", "host", release=8, prefetch=9),), "task 6, its first use"),
    ):
        with pytest.raises(PlanError, match=text):
            Simulator(CHAIN, costs if "no link" in text else cost_table(CHAIN, TITANX)).profile(
                plan_of(CHAIN, *decisions)
            )
    with pytest.raises(PlanError, match="got one without; capture it with backward=True"):
        Simulator(replace(CHAIN, tasks=(), blocks=()), replace(costs, algorithms=())).profile(plan_of(CHAIN))
