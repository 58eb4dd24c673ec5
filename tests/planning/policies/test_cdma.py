"""cDMA: zero-value compression on vDNN's schedule, where it pays."""

from dataclasses import replace

import pytest

from bench.papers.algorithms import paper_algorithms
from bench.papers.cdma import with_engine, zvc_ratio
from bench.papers.library_view import library_view
from gistkit.ir.tasks import Block
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.cdma import cdma, round_trip_s
from gistkit.planning.policies.vdnn import vdnn_all
from gistkit.planning.simulate.simulator import simulate
from tests.support.paper_costs import costs_of, device
from tests.support.step_graphs import chain

MIB = 2**20


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
