"""Layers of a step, and the step as the papers' libraries ran it."""

import pytest

from bench.papers.library_view import FORWARD_ALONE, library_view
from gistkit.ir.queries import layers
from gistkit.ir.saved_graph import SavedGraph
from tests.support.step_graphs import Step, chain, forked, pooled


def kept(graph):
    return {b.storage: b.nbytes for b in graph.blocks if b.uses and b.kind in ("input", "activation")}


def test_layers_group_forward_and_backward():
    made = layers(pooled())
    assert [layer.kind for layer in made] == [
        *("CONV", "ACTV", "CONV", "ACTV", "POOL", "CONV", "ACTV", "POOL", "DROPOUT", "FC", "OTHER")
    ]
    conv, pool = made[2], made[4]
    tasks = pooled().tasks
    assert [tasks[t].part for t in conv.backward] == ["weight", "input"]
    assert conv.tasks == (conv.forward, *conv.backward) and len(conv.weights) == 2
    assert pool.own and pool.own != pool.y
    assert made[6].x == made[6].y  # in place
    assert [layer.index for layer in made] == list(range(len(made)))


def test_layers_behind_an_fc_extract_no_features():
    step = Step()
    x = step.relu(step.linear(step.flatten(step.relu(step.conv(step.input(3, 8, 8), 4))), 10))
    flags = [(layer.kind, layer.features) for layer in layers(step.finish(step.linear(x, 5)))]
    assert flags == [*(("CONV", True), ("ACTV", True), ("FC", False), ("ACTV", False), ("FC", False), ("OTHER", False))]


def test_max_pool_reads_x_and_y_and_keeps_no_index():
    graph = pooled()
    view = library_view(graph)
    pool = next(layer for layer in layers(view) if layer.kind == "POOL")
    assert not any(b.dtype == "int64" for b in view.blocks)
    for block in (*pool.x, *pool.y):
        assert pool.backward[0] in [u.task for u in view.blocks[block].uses if u.values]
    task = view.tasks[pool.backward[0]]
    dy, dx = 2048, 8192
    assert task.moved_bytes == 8192 + 2048 + dy + dx  # X, Y, dY read, dX written


def test_activations_run_in_place_both_ways():
    graph = chain(layers=2)
    view = library_view(graph)
    relu = layers(view)[1]
    assert relu.x == relu.y and view.blocks[relu.x[0]].first == relu.forward - 1
    back = view.tasks[relu.backward[0]]
    gradients = [b for b in back.reads if view.blocks[b].kind == "gradient"]
    assert list(back.writes) == gradients
    assert kept(view) == kept(graph)
    apart = library_view(graph, inplace=False)
    assert layers(apart)[1].x != layers(apart)[1].y


@pytest.mark.parametrize("make", (pooled, forked, chain))
def test_a_view_is_a_whole_graph(make):
    view = library_view(make())
    assert [b.id for b in view.blocks] == list(range(len(view.blocks)))
    assert view.source == "library" and view.fingerprint == make().fingerprint
    for task in view.tasks:
        for block in (view.blocks[b] for b in (*task.reads, *task.writes)):
            until = max(block.last, *(u.task for u in block.uses)) if block.uses else block.last
            assert block.first <= task.index <= until
    assert SavedGraph.from_json(view.to_json()) == view


def test_gists_in_place_is_in_forward_alone():
    graph = chain(layers=2)
    view, both = library_view(graph, inplace=FORWARD_ALONE), library_view(graph)
    relu = layers(view)[1]
    assert relu.x == relu.y
    back = view.tasks[relu.backward[0]]
    gradients = [b for b in back.reads if view.blocks[b].kind == "gradient"]
    assert not set(back.writes) & set(gradients)
    assert len(both.blocks) < len(view.blocks) < len(graph.blocks)
