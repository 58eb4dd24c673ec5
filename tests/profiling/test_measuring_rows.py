"""A batch that does not fit is measured on fewer of its rows."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit import MeasureError, capture
from gistkit.ir.scale import scaled
from gistkit.planning.cost.table import cost_table
from gistkit.profiling import measure
from gistkit.profiling.measure import Measured, Work, step_times
from gistkit.runtime.offload.host_memory import does_not_fit
from tests.support.measuring_cases import CPU, step, targets


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


OUT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("FIND was unable to find an engine to execute this computation"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


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


def test_other_errors_of_the_step_are_its_own(monkeypatch):
    limited(monkeypatch, 0, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2"):
        gistkit.measure(*step())
    assert not does_not_fit(ValueError("out of memory")) and not does_not_fit(RuntimeError("an engine"))


class Whole(nn.Module):
    """Works with all eight rows only."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(x).reshape(8, 3)


def test_a_batch_that_cannot_be_cut(monkeypatch):
    original = measure.measured_step

    def measured(graph, model, work):
        if len(work.args[0]) == 8:
            raise OUT[0]
        return original(graph, model, work)

    monkeypatch.setattr(measure, "measured_step", measured)
    with pytest.raises(MeasureError) as raised:
        gistkit.measure(Whole(), torch.randn(8, 3))
    assert re.fullmatch(
        r"measure: a plain step on all 8 rows does not fit, and on the first 4 of them it fails \(RuntimeError: shape "
        r".*\); measure with a batch that fits, or plan without measured times",
        str(raised.value),
    )


def test_a_host_is_not_tried_beyond_its_memory(monkeypatch):
    """A host would swap, or end the process."""
    model, x = step(16)
    graph = capture(model, (x,), backward=True)
    peak_bytes = gistkit.plan(model, x, policy="plain").peak_bytes
    tried = limited(monkeypatch, 16, OUT[0])
    for available_bytes, rows in ((peak_bytes, 16), (peak_bytes - 1, 8), (0, 16), (1, 1)):
        monkeypatch.setattr(measure, "available_bytes", lambda n=available_bytes: n)
        assert step_times(graph, CPU, model, Work((x,), {})).rows == rows == tried[-1]
