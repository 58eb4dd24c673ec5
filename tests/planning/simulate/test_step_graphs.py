"""The synthetic steps are consistent: ids, times of life, uses; and they are what a capture gives."""

import pytest
from hypothesis import given, settings

from gistkit.ir.saved_graph import SavedGraph
from gistkit.planning.policies.gist import gist
from tests.support.step_graphs import chain, forked, pooled, step_graphs


def check(graph, dead=False):
    """``dead``: something may be saved that no backward task needs."""
    end = len(graph.tasks)
    assert [t.index for t in graph.tasks] == list(range(end))
    assert [b.id for b in graph.blocks] == list(range(len(graph.blocks)))
    made = {b for t in graph.tasks for b in t.writes}
    for block in graph.blocks:
        assert -1 <= block.first <= block.last <= end
        assert (block.id in made) == (block.kind in ("activation", "gradient", "weight_gradient"))
        if block.saved >= 0:
            assert block.first <= block.saved
            assert block.saved <= block.holder or (dead and block.holder < 0 and not block.uses)
            assert all(block.saved < u.task <= block.holder for u in block.uses)
    for task in graph.tasks:
        for block in (graph.blocks[b] for b in task.reads + task.writes):
            held = [block.last, *(u.task for u in block.uses)]
            assert block.first <= task.index <= max(held), (task, block)
    kept = {b.storage for b in graph.blocks if b.saved >= 0 and b.kind in ("input", "activation")}
    assert kept == {s.id for s in graph.kept()}
    assert SavedGraph.from_json(graph.to_json()) == graph
    gist(graph)


@pytest.mark.parametrize("build", [chain, pooled, forked])
def test_networks_are_consistent(build):
    check(build())


@given(step_graphs(8, varied=True))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_varied_steps_are_consistent(graph):
    check(graph, dead=True)


@given(step_graphs(8))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_drawn_steps_are_consistent(graph):
    check(graph)
    wide = [s for s in graph.kept() if len(s.shape) > 1]
    assert len(wide) <= 8
