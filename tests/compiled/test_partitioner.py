"""The whole partitioner on small networks, run without Inductor: bits of results, what is kept, symbolic sizes."""

import pytest
import torch

from gistkit.compiled import record
from gistkit.compiled.partitioner import Settings, cut
from tests.support.compiled_cases import assert_same, backend_over, case, fresh_step, loss_of

SETTINGS = Settings()


def amp_loss(model, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, x, y)


def run(loss, model, batches, settings, dynamic=False):
    """(results of each batch, records of the graphs); plainly where settings is None."""
    torch._dynamo.reset()
    partition = None if settings is None else lambda *args, **words: cut(*args, settings, **words)
    with record.collected() as found:
        forward = torch.compile(loss, backend=backend_over(partition), fullgraph=True, dynamic=dynamic)
        return [fresh_step(model, x, y, forward) for x, y in batches], found


@pytest.mark.parametrize(("name", "loss"), [("vgg", loss_of), ("resnet", amp_loss), ("transformer", loss_of)])
def test_same_bits_and_fewer_bytes(name, loss):
    model, x, y = case(name)
    plain, _ = run(loss, model, [(x, y)], None)
    ours, (graph,) = run(loss, model, [(x, y)], SETTINGS)
    assert_same(plain[0], ours[0])
    assert graph.kept_bytes < graph.plain_bytes
    packed = {"vgg": {"mask1", "map4"}, "resnet": {"map4"}, "transformer": {"mask1"}}[name]
    assert {row.form for row in graph.rows} == packed | {"dense"}
    assert all(row.reason and row.kept_bytes <= row.plain_bytes for row in graph.rows)
    assert all(row.kept_bytes * 8 == row.plain_bytes for row in graph.rows if row.form == "mask1")
    assert all(row.kept_bytes * 2 == row.plain_bytes for row in graph.rows if row.form == "map4")


@pytest.mark.parametrize("name", ["vgg", "transformer"])
def test_sizes_that_change_from_call_to_call(name):
    model, x, y = case(name, rows=12)
    batches = [(x, y), (x[:6], y[:6])]
    plain, _ = run(loss_of, model, batches, None, dynamic=True)
    ours, records = run(loss_of, model, batches, SETTINGS, dynamic=True)
    assert len(records) == 1  # one graph for both batches
    assert "mask1" in {row.form for row in records[0].rows}
    for some, others in zip(plain, ours, strict=True):
        assert_same(some, others)


def test_masks_move_behind_max_pools():
    model, x, y = case("vgg")
    _, (graph,) = run(loss_of, model, [(x, y)], SETTINGS)
    assert dict(graph.rewrites)["masks of ReLUs that a max-pool's output tells"] == 2
    masks = [row.shape for row in graph.rows if row.dtype == "bool" and len(row.shape) == 4]
    assert (8, 8, 16, 16) in masks  # of the first ReLU, which no pool reads
    assert masks.count((8, 16, 8, 8)) == 1  # of the third; the fourth one's moved
