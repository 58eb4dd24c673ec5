"""A given plan is carried out: every kind of decision, to the bit and the byte."""

import copy
from dataclasses import replace

import pytest
import torch

import gistkit
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.forms.allowed import own_decisions
from tests.support.models import DenseNet, UNet
from tests.support.plan_cases import LINKED, Small, captured, data, made, same, step, ways
from tests.support.predicted import steady_peak_bytes


@pytest.mark.parametrize(
    ("make", "place", "number"),
    [(Small, "device", 0), (Small, "host", 2), (UNet, "device", 2), (UNet, "host", 1), (DenseNet, "host", 0)],
)
def test_every_decision_is_carried_out_to_the_bit_and_the_byte(make, place, number):
    torch.manual_seed(0)
    model, (x, y) = make().train(), data()
    graph, _ = captured(model, x, y)
    recorded = gistkit.capture(model, (x,), fake=False)
    costs = cost_table(graph, LINKED, density={s.id: s.density for s in recorded.storages if s.density is not None})
    plan = made(graph, ways(graph, costs, number, place))
    twin = gistkit.compress(copy.deepcopy(model), plan)
    step(twin, x, y)
    found, plain = step(twin, x, y), step(copy.deepcopy(model), x, y)
    step(model, x, y)  # running statistics as the twin's
    assert same(found, plain)
    measured, predicted = found[2].peak_bytes, steady_peak_bytes(graph, plan, costs)
    # a source may go somewhat before its release, at the start of the covered call before it
    assert measured == predicted if place == "device" or number == 0 else 0.9 * predicted < measured <= predicted


def test_what_a_plan_leaves_open_stays_as_it_is():
    model, (x, y) = UNet().train(), data()
    graph, costs = captured(model, x, y, hardware("cpu"))
    plan = replace(made(graph, own_decisions(graph)), choices=())  # maps that no op makes in another form
    twin = gistkit.compress(copy.deepcopy(model), plan)
    step(twin, x, y)
    assert step(twin, x, y)[2].peak_bytes == steady_peak_bytes(graph, plan, costs)
    rows = gistkit.report(twin).stats.rows
    assert {r.codec for r in rows if r.storage >= 0} == {"dense"} and len(rows) > 20
