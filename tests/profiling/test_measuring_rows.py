"""A batch that does not fit is measured on fewer of its rows."""

import pytest
import torch
import torch.nn.functional as F

import gistkit
from gistkit import MeasureError, capture
from gistkit.ir.scale import scaled
from gistkit.planning.cost.table import cost_table
from gistkit.profiling import measure
from gistkit.profiling.measure import Measured
from tests.support.measuring_cases import CPU, step, targets

OUT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("FIND was unable to find an engine to execute this computation"),
]


def limited(monkeypatch, most_rows, error):
    """A device on which more rows do not fit; every task takes 1 s, a step 9 s."""
    tried = []

    def measured(graph, model, work):
        tried.append(len(work.args[0]))
        assert all(len(t) == tried[-1] for t in work.targets)
        if tried[-1] > most_rows:
            raise error
        return Measured(dict.fromkeys(range(len(graph.tasks)), 1.0), {}, 9.0)

    monkeypatch.setattr(measure, "measured_step", measured)
    return tried


@pytest.mark.parametrize("error", OUT, ids=str)
def test_a_step_that_does_not_fit_is_measured_on_fewer_rows(monkeypatch, error):
    model, x = step(16)
    tried = limited(monkeypatch, 5, error)
    found = gistkit.measure(model, x, targets(16), loss_fn=F.cross_entropy)
    assert tried == [16, 8, 4] and (found.batch, found.rows, found.step_s) == (16, 4, 9.0)
    graph = capture(model, (x,), backward=True, loss_fn=F.cross_entropy, targets=(targets(16),))
    whole, part = cost_table(graph, CPU), cost_table(scaled(graph, 4), CPU)
    conv = next(t.index for t in graph.tasks if t.op == "conv2d")
    assert found.seconds[conv] == pytest.approx(whole.task_s(conv) / part.task_s(conv))
    assert 3.5 < found.seconds[conv] <= 4 and all(1 <= s <= 4 for s in found.seconds.values())
    plan = gistkit.plan(model, x, targets(16), loss_fn=F.cross_entropy, policy="plain", measure=found)
    assert plan.prediction.measured.rows == 4
    text = str(gistkit.profile(model, x, targets(16), loss_fn=F.cross_entropy, measure=found))
    assert "a step of 4 rows, scaled to 16 took 9,000 ms, all tasks of the batch add up to" in " ".join(text.split())


def test_not_even_one_row(monkeypatch):
    tried = limited(monkeypatch, 0, OUT[0])
    with pytest.raises(MeasureError) as raised:
        gistkit.measure(*step(6))
    assert tried == [6, 3, 2, 1] and raised.value.__cause__ is OUT[0]
    assert str(raised.value) == (
        "measure: a plain step must fit cpu with one row of the batch at least, and does not (OutOfMemoryError: CUDA "
        "out of memory. Tried to allocate 2.00 GiB.); free some of its memory, measure on a larger device and pass the "
        "file, or plan without measured times"
    )
