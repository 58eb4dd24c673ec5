"""Lossless is bit for bit: loss, gradients, buffers and parameters after many steps, for the zoo's families."""

import pytest
import torch
from torch import nn

from gistkit.zoo.resnet import BasicBlock, ResNet
from tests.support.graphs import Apply
from tests.support.models import bottlenecks, convolutions, inceptions
from tests.support.training import assert_same_training, batches

STEPS = 6
"""Plans are made anew by the zeros of steps 1, 2 and 5; `bench.bitwise` takes twenty of every network."""


def basic_blocks():
    """Three of resnet1202's blocks, with zero-padded shortcuts."""
    return ResNet(BasicBlock, (1, 1, 1), 10)


@pytest.mark.parametrize("make", [bottlenecks, basic_blocks, convolutions, inceptions])
def test_steps_of_a_few_blocks(make):
    """Of resnet50, resnet1202, vgg16, googlenet."""
    assert_same_training(make(), batches(STEPS, 2, 32))


def test_channels_last():
    data = [(x.contiguous(memory_format=torch.channels_last), t) for x, t in batches(3, 2, 32)]
    assert_same_training(basic_blocks().to(memory_format=torch.channels_last), data)


def test_autocast_to_bf16():
    def loss_fn(out, target):
        return nn.functional.cross_entropy(out.float(), target)

    def forward(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return m[0](x)

    assert_same_training(Apply(forward, basic_blocks()), batches(3, 2, 32), loss_fn=loss_fn)


def test_bf16_weights():
    assert_same_training(convolutions().bfloat16(), [(x.bfloat16(), t) for x, t in batches(3, 2, 32)])


@pytest.mark.parametrize("planted", [(float("nan"),), (float("inf"), -float("inf"), -0.0, 1e-40, -1e-40)])
def test_planted_values(planted):
    data = batches(1, 2, 32)
    for at, value in enumerate(planted):
        data[0][0][:, :, at::6, ::5] = value
    assert_same_training(basic_blocks(), data)
    assert_same_training(convolutions(), data)


def test_last_batch_of_another_size():
    assert_same_training(basic_blocks(), [*batches(2, 6, 32), *batches(1, 3, 32)])
