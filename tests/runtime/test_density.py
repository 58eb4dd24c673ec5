"""The policy follows the measured density over the first steps, as Gist watches its first 200 minibatches."""

import torch
from torch import nn

import gistkit
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.runtime.engine import REPLAN_AFTER
from tests.support.graphs import Apply


def test_codec_follows_the_measured_density_up_and_down():
    model = gistkit.compress(nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 3)))
    x, codecs = torch.randn(4, 3, 32, 32), []
    for step in range(1, 12):
        with torch.no_grad():
            model[0].bias.fill_(8.0 if step <= 3 else -1.7)
        model(x).sum().backward()
        codecs.append(next(r.codec for r in gistkit.report(model).stats.rows if r.op == "relu" and r.plain_bytes))
    # Step 1 is planned with the assumed density, finds nothing to leave out and keeps the tensor; its count plans the
    # next.
    # Dense tensors are counted in the steps after which the plan is made anew: the change at step 4 is seen in step 5.
    assert {1, 2, 5, 10} <= REPLAN_AFTER
    assert codecs[:5] == ["dense"] * 5
    assert codecs[5:] == ["csr"] * 6


def _residual():
    inner = nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
    return Apply(lambda m, x: torch.relu(m[1](m[0](x)) + x), *inner)


def test_residual_blocks_are_expected_to_be_denser():
    """0.5 / sqrt(k + 1) of the k-th block's output is zero; the model is of independent terms, near what comes out."""
    model, x = nn.Sequential(*(_residual() for _ in range(4))), torch.randn(4, 64, 24, 24).relu()
    graph = gistkit.capture(nn.Sequential(nn.Conv2d(64, 64, 1), nn.ReLU(), model), (x,), backward=True)
    costs = cost_table(graph, hardware("cpu"))
    relus = [c.writes[0] for c in graph.calls if c.op == "relu"]
    assert [round(costs.densities[s], 3) for s in relus] == [0.5, 0.646, 0.711, 0.75, 0.776]
    seen = []
    for block in model:
        x = block(x)
        seen.append(float((x != 0).float().mean()))
    # An estimate, no bound: batch norm's term has variance 1, what was rectified less. A half is 0.15 to 0.28 off.
    assert max(abs(a - b) for a, b in zip(seen, (0.646, 0.711, 0.75, 0.776), strict=True)) < 0.05
