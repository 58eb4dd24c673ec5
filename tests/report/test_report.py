"""The report's reasons where PyTorch's own path is taken: never a silent downgrade."""

import pytest
import torch
from torch import nn

import gistkit


@pytest.mark.parametrize("real", [False, True])
def test_a_dtype_without_kernels_is_kept_and_named(real):
    """``real``: a hook makes the first step a recorded one, without a plan."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU())
    twin = gistkit.compress(model.double())
    if real:
        model[1].register_forward_hook(lambda *_: None)
    for _ in range(2):
        twin(torch.randn(4, 3, 32, 32, dtype=torch.float64)).sum().backward()
    rows = [row for row in gistkit.report(twin).stats.rows if row.op in ("relu", "conv2d", "max_pool2d")]
    assert rows and {row.codec for row in rows} == {"dense"}
    assert any(row.op == "relu" and row.reason == "no codec for float64" for row in rows)
    assert gistkit.report(twin).ratio == pytest.approx(1, abs=0.01)
