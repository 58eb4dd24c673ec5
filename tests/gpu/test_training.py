"""Live bytes and the training comparison where backward runs in the device's own thread."""

import pytest
import torch

from gistkit.runtime.live import LiveBytes
from gistkit.training import Comparison, TrainSettings
from gistkit.zoo.resnet import BasicBlock, Bottleneck, ResNet
from tests.support.models import gated_chain
from tests.support.training import assert_same_training, batches


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
    result = Comparison(TrainSettings("vgg16", steps=4, batch=32, image_size=64, device="cuda")).run()
    plain, lossless, lossy = result.runs
    assert result.first_difference is None
    assert lossy.kept_bytes < lossless.kept_bytes < plain.kept_bytes
    for run in result.runs:
        # The allocator rounds up and counts workspaces, which live bytes do not see.
        assert run.device_peak_bytes is not None and run.device_peak_bytes >= run.peak_bytes


@pytest.mark.parametrize("make", [lambda: ResNet(BasicBlock, (1, 1, 1), 10), lambda: ResNet(Bottleneck, (1, 1, 1), 10)])
def test_steps_whose_first_data_do_not_tell_arithmetics_apart(make):
    """The means of their first batch norms are next to nothing, by which two arithmetics give the first step's bits."""
    assert_same_training(make().cuda(), [(x.cuda(), t.cuda()) for x, t in batches(8, 4, 32)])


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "autocast"])
def test_gates_hold_the_stashes_of_what_they_scale(narrow):
    with torch.autocast("cuda", torch.bfloat16, enabled=narrow):
        assert_same_training(gated_chain(4).cuda(), [(x.cuda(), t.cuda()) for x, t in batches(8, 4, 32)])
