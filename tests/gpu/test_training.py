"""Live bytes and the training comparison where backward runs in the device's own thread."""

import pytest
import torch

from gistkit.runtime.live import LiveBytes
from gistkit.train import TrainSettings, train

pytestmark = pytest.mark.gpu


def test_backward_in_the_device_thread_is_seen():
    x, w = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda", requires_grad=True)
    with LiveBytes() as live:
        loss = torch.relu(x @ w).sum()
        assert live.current_bytes == 64 * 64 * 4 + 4
        loss.backward()
        # The weight's gradient and the loss.
        assert live.current_bytes == 64 * 64 * 4 + 4
    assert {e.op for e in live.timeline if e.backward} >= {"aten::threshold_backward", "aten::mm"}


def test_lossless_training_equals_plain_and_needs_less_device_memory():
    result = train(TrainSettings("vgg16", steps=4, batch=32, image_size=64, device="cuda"))
    plain, lossless, lossy = result.runs
    assert result.first_difference is None
    assert lossy.kept_bytes < lossless.kept_bytes < plain.kept_bytes
    for run in result.runs:
        # The allocator rounds up and counts workspaces, which live bytes do not see.
        assert run.device_peak_bytes is not None and run.device_peak_bytes >= run.peak_bytes
