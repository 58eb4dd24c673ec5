"""Networks of odd structure under which a compressed model once failed or computed otherwise than plain PyTorch."""

import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gistkit
from gistkit.runtime.stash.verify import same_bits
from tests.runtime.test_attacks import assert_same_gradients, images


class InnerSlice(nn.Module):
    """A convolution saves a part of a ReLU's output that is too dense for sparse storage."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3)
        nn.init.constant_(self.stem.bias, 9.0)

    def forward(self, x):
        return self.head(torch.relu(self.stem(x))[:, :, 1:-1, 1:-1]).square().mean()


def test_a_part_of_a_relu_that_stays_dense_is_not_counted():
    assert_same_gradients(InnerSlice(), lambda model, step: model(images()), steps=3)


def stage():
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(4))


class Checkpointed(nn.Module):
    """Two checkpoints in a row, in a model that is recorded on its first real step as it has a hook."""

    def __init__(self):
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(3, 4, 3), stage(), stage()
        self.stem.register_forward_hook(lambda *_: None)

    def forward(self, x):
        x = checkpoint(self.first, self.stem(x), use_reentrant=False)
        return checkpoint(self.second, x, use_reentrant=False).mean()


def test_recording_a_step_runs_no_checkpoint_anew():
    plain = Checkpointed()
    twin = gistkit.compress(copy.deepcopy(plain))
    for step in range(3):
        for model in (plain, twin):
            model(images()).backward()
        assert twin.first[2].num_batches_tracked == plain.first[2].num_batches_tracked == 2 * (step + 1)
        assert all(same_bits(a, b) for a, b in zip(plain.buffers(), twin.buffers(), strict=True))
