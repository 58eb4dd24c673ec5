"""Convolutions that take both gradients at once where later calls have let go of as much: no higher peak."""

import dataclasses

import pytest
import torch
from torch import nn

import gistkit
from gistkit.capture.entry import capture
from gistkit.planning.policies.gist_rules import gist
from gistkit.runtime.forward import state
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.program.joint_gradients import Headroom, headrooms
from tests.support.nn_cases import same_bits

WIDTH, DEPTH = 8, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in range(2))

    def forward(self, x):
        y = torch.relu(self.norms[0](self.a(x)))
        return torch.relu(self.norms[1](self.b(y)) + x)


def network():
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU())
    return nn.Sequential(stem, *(Block() for _ in range(DEPTH)))


def image(batch=4):
    return torch.randn(batch, 3, 24, 24, generator=torch.Generator().manual_seed(1))


def planned(model, batch=4):
    graph = capture(model, (image(batch),), {})
    return graph, gist(graph)


def step(model, x):
    """(peak, names of the convolutions' nodes, gradients) of the third step."""
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        with LiveBytes(timeline=False) as live:
            loss = model(x).square().sum()
            names = _nodes(loss)
            loss.backward()
            del loss
    return live.peak_bytes, names, [p.grad for p in model.parameters()]


def _nodes(loss):
    seen, pending = {}, [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen[node] = node.name()
            pending.extend(edge for edge, _ in node.next_functions)
    return list(seen.values())


def test_pytorchs_nodes_raise_no_peak_where_there_is_room(monkeypatch):
    monkeypatch.setattr(state, "JOINT_BYTES", 0)
    joint, fewer, grads = step(gistkit.compress(network()), image())
    monkeypatch.setattr(state.ForwardState, "has_room", lambda *_: False)
    apart, own, wanted = step(gistkit.compress(network()), image())
    assert own.count("_Conv2dBackward") == 2 * DEPTH and 0 < fewer.count("_Conv2dBackward") <= DEPTH
    assert all(map(same_bits, grads, wanted)) and joint <= apart


def test_the_last_convolutions_have_no_room():
    graph, plan = planned(network())
    convolutions = {c.covered for c in graph.calls if c.op == "conv2d"}
    found = {call: room for call, room in headrooms(graph, plan).items() if call in convolutions}
    calls = sorted(found)
    assert len(calls) == 2 * DEPTH + 1
    spare = [found[c].spare_bytes for c in calls]
    assert spare[1:] == sorted(spare[1:], reverse=True) and spare[-1] < 0 < spare[1]
    size, statistics = 4 * WIDTH * 24 * 24 * 4, 2 * WIDTH * 4
    later = 2 * size + statistics  # its batch norm's input, and the output of all
    assert found[calls[-1]] == Headroom(size, later - 3 * size, found[calls[-1]].weight_bytes)
    assert spare[-2] == later + size + statistics - 3 * size
    assert found[calls[-1]].weight_bytes == sum(4 * p.numel() for p in network().parameters())


def test_what_a_convolution_keeps_itself_makes_no_room():
    model = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1, bias=False) for _ in range(3)))
    found, size = headrooms(*planned(model)), 4 * 3 * 24 * 24 * 4
    assert [found[c].spare_bytes for c in sorted(found)] == [2 * size - 3 * size, size - 3 * size, -3 * size]


def test_narrow_codes_make_the_room_that_they_take():
    model = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1, bias=False) for _ in range(3)))
    (graph, plan), size = planned(model), 4 * 3 * 24 * 24 * 4
    for codec, part in (("fp8", size // 4), ("fp8s", size // 4), ("fp10", size // 32 * 10), ("fp16", size // 2)):
        decisions = tuple(dataclasses.replace(d, codec=codec) for d in plan.decisions)
        found = headrooms(graph, dataclasses.replace(plan, decisions=decisions))
        assert [found[c].spare_bytes for c in sorted(found)] == [n * part - 3 * size for n in (2, 1, 0)], codec


@pytest.mark.parametrize("changed", [{"codec": "zvc"}, {"place": "host"}, {"codec": "rebuild"}])
def test_only_what_lies_on_the_device_in_a_known_size_makes_room(changed):
    graph, plan = planned(network())
    decisions = tuple(dataclasses.replace(d, **changed) if d.codec == "dense" else d for d in plan.decisions)
    found = headrooms(graph, dataclasses.replace(plan, decisions=decisions))
    assert all(room.spare_bytes < 0 for room in found.values())


def test_weights_do_not_grow_with_a_batch():
    room = Headroom(input_bytes=100, spare_bytes=50, weight_bytes=50)
    assert room.suffices(100) and room.suffices(200) and not room.suffices(99)
    assert not Headroom(100, -1, 0).suffices(1) and Headroom(100, 0, 0).suffices(100)
