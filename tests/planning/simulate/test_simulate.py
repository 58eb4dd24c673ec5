"""The simulator: memory against the definition, seconds against hand-made cases, peaks against measured steps."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gistkit
from gistkit.api.planning import plan_graph
from gistkit.ir.plan import Decision, Plan
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.gist_rules import gist
from gistkit.planning.simulate.intervals import Beside, Transfer, delays, load_of
from gistkit.planning.simulate.simulator import Simulator, memory_bytes, simulate
from tests.support.models import Call
from tests.support.peaks import densities_of, held_step, peaks_of_steps, steady_peak_bytes
from tests.support.step_graphs import chain, step_graphs

BYTES = 8192
CHAIN = chain(2)
RELU = next(b for b in CHAIN.blocks if b.saved == 1)
EVERY = {task.index: 1.0 for task in CHAIN.tasks}


def plan_of(graph, *decisions, policy="test", **fields):
    return Plan(policy, graph.fingerprint, decisions, (), **fields)


def link(d2h_s, h2d_s, both=None):
    """A device whose link takes so many seconds for 8192 bytes."""
    rates = BYTES / d2h_s / 1e9, BYTES / h2d_s / 1e9
    return replace(
        hardware("titanx"), launch_s=0.0, d2h_gbps=rates[0], h2d_gbps=rates[1], both_gbps=sum(rates) * (both or 1.0)
    )


def timed(d2h_s, h2d_s, **decision):
    """A chain whose 11 tasks take a second each, with one storage on the host."""
    host = Decision(RELU.storage, "dense", "host", **{"release": 4, "prefetch": 6, **decision})
    return simulate(CHAIN, plan_of(CHAIN, host), cost_table(CHAIN, link(d2h_s, h2d_s), measured_s=EVERY))


@given(step_graphs(8), st.integers(0, 10**6), st.sampled_from(("plain", "none", "gist", "fp8")))
@settings(max_examples=20)
def test_memory_is_the_sum_of_what_lives(graph, reserve, which):
    costs = cost_table(graph, hardware("titanx"))
    bare = which in ("plain", "none")
    plan = plan_of(graph, policy=which) if bare else gist(graph, lossy=None if which == "gist" else which)
    found, lives = simulate(graph, plan, costs, reserve=reserve), Simulator(graph, costs).profile(plan).intervals
    by_hand = [reserve + sum(i.nbytes for i in lives if i.first <= t <= i.last) for t in range(len(graph.tasks))]
    assert list(found.memory_bytes) == by_hand == memory_bytes(lives, len(graph.tasks), reserve)
    assert found.peak_bytes == max(by_hand) and by_hand.index(found.peak_bytes) == found.peak_task
    assert found.step_s == pytest.approx(found.compute_s + found.extra_s) and found.stall_s == 0
    assert found.d2h_bytes == found.h2d_bytes == 0


def test_release_and_first_use_wait():
    # offloaded from task 2 on: 2.5 s instead of 2 until task 4 begins; back from task 6 on, wanted by task 7
    found = timed(2.5, 3.0)
    assert found.start_s == pytest.approx((0, 1, 2, 3, 4.5, 5.5, 6.5, 9.5, 10.5, 11.5, 12.5))
    assert found.stall_s == pytest.approx(2.5) and found.step_s == pytest.approx(13.5)
    assert found.memory_bytes == timed(0.1, 0.1).memory_bytes


def carried(transfers, costs):
    """Seconds at which every transfer is done, all issued at 0."""
    ends = []
    for place, last in enumerate(transfers):
        due = (1 if i <= place and t.direction == last.direction else 2 for i, t in enumerate(transfers))
        loads = [load_of(t._replace(due=task), costs) for t, task in zip(transfers, due, strict=True)]
        ends.append(delays(np.zeros(2), loads, costs.hardware.shared_rate, Beside(np.zeros(2), np.zeros(2)))[1])
    return ends


def test_directions_share_the_link_and_queues_are_in_order():
    d2h, h2d = (Transfer(0, BYTES, d, 0, 1) for d in ("d2h", "h2d"))
    alone = SimpleNamespace(hardware=link(2.0, 1.0), d2h_s=lambda n: 2.0, h2d_s=lambda n: 1.0)
    half = SimpleNamespace(hardware=link(2.0, 1.0, 0.5), d2h_s=lambda n: 2.0, h2d_s=lambda n: 1.0)
    assert carried([d2h, h2d], alone) == [2, 1]
    # both at half their rate until h2d is done at 2; d2h has one second of its own left then
    assert carried([d2h, h2d], half) == [3, 2]
    assert carried([d2h, h2d, h2d], half) == pytest.approx([4, 2, 4])
    assert carried([h2d, h2d, h2d], half) == [1, 2, 3]


def issuing(host_s, runtime_host_s):
    return replace(link(2.0, 2.0), host_s=host_s, runtime_host_s=runtime_host_s)


def step_s(graph, plan, device, **words):
    return simulate(graph, plan, cost_table(graph, device, **words)).step_s


def test_a_host_that_is_late_is_waited_for():
    # 11 tasks of a second each; a host that needs half of one for each is ahead after the first.
    assert step_s(CHAIN, plan_of(CHAIN, policy="plain"), issuing(0.5, 0.9), measured_s=EVERY) == 0.5 + 11
    assert step_s(CHAIN, plan_of(CHAIN), issuing(0.5, 0.9), measured_s=EVERY) == pytest.approx(0.9 + 11)
    assert step_s(CHAIN, plan_of(CHAIN, policy="plain"), issuing(0.0, 0.9), measured_s=EVERY) == 11
    # One that needs longer than the device is behind all through: the last task begins when it is issued.
    last_is_long = {**dict.fromkeys(EVERY, 0.5), 10: 4.0}
    assert step_s(CHAIN, plan_of(CHAIN), issuing(0.0, 0.75), measured_s=last_is_long) == 11 * 0.75 + 4.0
    # Between, the tasks that are behind wait, and those after them begin with the ones before.
    first_are_short = {**EVERY, 0: 0.1, 1: 0.1, 2: 0.1}
    assert step_s(CHAIN, plan_of(CHAIN), issuing(0.0, 0.75), measured_s=first_are_short) == pytest.approx(4 * 0.75 + 8)


def test_a_transfer_begins_when_its_task_is_issued():
    # Out from task 2 on, before task 4: 2.5 s; back from task 6 on, before task 7: 3 s. Overlapped they stall for 0.5
    # and 2 s. A host that is ahead adds its first task. With tasks of half a second one that takes 0.75 s for each is
    # waited for: out, 1.25 s, fits behind the two tasks until then; back, 1.5 s, does not.
    host = Decision(RELU.storage, "dense", "host", release=4, prefetch=6)
    plan, device = plan_of(CHAIN, host), link(2.5, 3.0)
    assert step_s(CHAIN, plan, device, measured_s=EVERY) == pytest.approx(13.5)
    ahead = replace(device, runtime_host_s=0.25)
    assert step_s(CHAIN, plan, ahead, measured_s=EVERY) == pytest.approx(13.5 + 0.25)
    late = replace(link(1.25, 1.5), runtime_host_s=0.75)
    found = simulate(CHAIN, plan, cost_table(CHAIN, late, measured_s=dict.fromkeys(EVERY, 0.5)))
    begins = np.cumsum([1, 1, 2, 1, 1, 1, 2, 1, 1, 1, 1]) * 0.75  # two transfers are issued, too
    begins[7:] = np.maximum(begins[7:], begins[6] + 1.5 + 0.5 * np.arange(4))
    assert found.start_s == pytest.approx(tuple(begins))


def test_the_host_waits_for_no_size_of_what_goes_to_the_host():
    # The device alone knows how large a sparse payload is; a host that is ahead stays so.
    ahead, sizes = replace(link(0.25, 0.3), runtime_host_s=0.4), dict.fromkeys(EVERY, 1.0)
    for codec in ("dense", "zvc"):
        plan = plan_of(CHAIN, Decision(RELU.storage, codec, "host", release=4, prefetch=6))
        assert step_s(CHAIN, plan, ahead, measured_s=sizes) == pytest.approx(11 + 0.4, abs=1e-3)


def test_transfers_slow_the_tasks_beside_them_that_move_bytes():
    # 2 s out from task 2 on, before task 5, and 2 s back from task 5 on, before task 7. At a share of a quarter tasks
    # that moving bytes bounds take 1.25 s beside a transfer: three of them 3.75 s, 2 s of which the link is busy.
    host = Decision(RELU.storage, "dense", "host", release=5, prefetch=5, ready=7)
    plan, device = plan_of(CHAIN, host), replace(link(2.0, 2.0), link_interference=0.25)
    assert step_s(CHAIN, plan, replace(device, link_interference=0.0), measured_s=EVERY) == pytest.approx(11)
    assert step_s(CHAIN, plan, device, measured_s=EVERY) == pytest.approx(11 + 0.75 * 2 / 3.75 + 0.5 * 2 / 2.5)
    assert step_s(CHAIN, plan_of(CHAIN), device, measured_s=EVERY) == 11, "nothing is sent"
    slow = replace(device, flops=dict.fromkeys(device.flops, 1.0))
    table = cost_table(CHAIN, slow)
    assert {table.slowed(t) for t in CHAIN.tasks if t.flops} == {0.0}, "arithmetic bounds them"
    assert step_s(CHAIN, plan, slow, measured_s=EVERY) < step_s(CHAIN, plan, device, measured_s=EVERY)


@pytest.mark.parametrize("policy", ["plain", "gist"])
@pytest.mark.parametrize(("between", "inplace"), [((42,), True), ((7, 6), True), ((7, 6), False)])
def test_linears_over_several_dimensions_with_a_relu_after_them(between, inplace, policy):
    """The mean of all rows."""
    layers = nn.Linear(32, 64), nn.ReLU(inplace), nn.Linear(64, 64), nn.ReLU(inplace), nn.Linear(64, 10)
    model = nn.Sequential(*layers, Call(lambda y: y.flatten(1, -2).mean(1)))
    x, y = torch.randn(8, *between, 32), torch.arange(8)
    graph = gistkit.capture(model, (x,), backward=True, loss_fn=F.cross_entropy, targets=(y,))
    costs = cost_table(graph, hardware("cpu"), density=densities_of(model, x))
    plan = plan_graph(graph, costs, policy=policy)
    if policy == "gist":
        gistkit.compress(model, plan)
    peaks = peaks_of_steps(model, lambda: held_step(model, F.cross_entropy, x, y), x, y)
    assert steady_peak_bytes(graph, plan, costs) == peaks[1]


def test_what_runs_anew_or_is_encoded_takes_the_host_longer():
    model = torch.nn.Sequential(*(m for _ in range(4) for m in (torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.ReLU())))
    graph = gistkit.capture(model, (torch.randn(16, 4, 8, 8),), backward=True)
    once = replace(hardware("h200"), runtime_host_s=1.0)

    def host_tasks(plan, factor):
        costs = cost_table(graph, replace(once, move_host_factor=factor, form_host_factor=factor))
        return float(Simulator(graph, costs).profile(plan).beside.host_s.sum())

    for policy in ("checkpoint", "gist", "vdnn-all"):
        plan = plan_graph(graph, cost_table(graph, once), policy=policy)
        bare = host_tasks(replace(plan, decisions=()), 1.0)
        assert bare == host_tasks(replace(plan, decisions=()), 3.0) == len(graph.tasks)
        first, second, third = (host_tasks(plan, factor) for factor in (1.0, 2.0, 3.0))
        assert bare <= first < second and third - second == second - first
