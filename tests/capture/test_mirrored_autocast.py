"""A step of another device under its autocast is captured with the CPU's operators, cast alike."""

import pytest
import torch
from torch import nn

import gistkit
from tests.support.graphs import Apply


def net():
    torch.manual_seed(0)
    parts = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 3))
    return nn.Sequential(*parts, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4))


@pytest.fixture
def cuda_autocast():
    """CUDA's autocast as a machine with a device has it in its context."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


def squares(y):
    return nn.functional.mse_loss(y, torch.zeros_like(y))


def on_meta():
    return gistkit.plan(net().to("meta"), torch.empty(4, 3, 12, 12, device="meta"), hardware="h200", loss_fn=squares)


def test_a_plan_under_the_devices_autocast_is_that_of_its_narrow_tensors(cuda_autocast):
    made = on_meta()
    torch.set_autocast_enabled("cuda", False)
    with torch.autocast("cpu", torch.bfloat16):
        expected = gistkit.plan(net(), torch.empty(4, 3, 12, 12), hardware="h200", loss_fn=squares)
    assert made.peak_bytes == expected.peak_bytes
    assert made.prediction.plain_peak_bytes == expected.prediction.plain_peak_bytes
    assert made.prediction.plain_peak_bytes < on_meta().prediction.plain_peak_bytes


def test_operators_that_cudas_autocast_takes_in_fp32_are_so_and_cross_entropy_saves_narrow_logarithms(cuda_autocast):
    norms = Apply(lambda m, x: m[0](m[1](m[0](x)).softmax(-1)), nn.Linear(8, 8), nn.LayerNorm(8))
    x, y = torch.empty(4, 8, device="meta"), torch.empty(4, dtype=torch.long, device="meta")
    loss = nn.functional.cross_entropy
    graph = gistkit.capture(norms.to("meta"), (x,), backward=True, loss_fn=loss, targets=(y,))
    dtypes = {task.op: task.dtype for task in reversed(graph.tasks)}  # a forward's where it has both
    assert dtypes["layer_norm"] == dtypes["softmax"] == dtypes["NllLossBackward0"] == "float32"
    assert dtypes["linear"] == dtypes["LogSoftmaxBackward0"] == "bfloat16"
