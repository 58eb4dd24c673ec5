"""Images that are decoded once and stay on the device: crops, flips and normalisation run there, so that an epoch of
CIFAR-10 costs seconds on a GPU.

Augmentation is the usual one for small images (He et al., 2016, section 4.2): black borders of 4 pixels, a random crop
of the old size, a flip from left to right for every other image. Order, crops and flips of an epoch are drawn on the
CPU and depend on (seed, epoch) alone, so they are the same on every device and after a restart.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from gistkit.errors import DataError
from gistkit.training.data import ImageSet, open_images

BORDER = 4
Batch = tuple[torch.Tensor, torch.Tensor]


def epoch_seed(seed: int, epoch: int) -> int:
    """A seed for one epoch, unrelated to those of other epochs and seeds."""
    return int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])


def device_images(source: str, image_size: int) -> tuple[DeviceImages, DeviceImages]:
    """(training images, test images) of :func:`.data.open_images`, on the CPU. Raises what that raises, and DataError
    where there are none to test on."""
    train, test = open_images(source, image_size)
    if test is None:
        raise DataError(f"{source} must have images to test on; put them into test/CLASS beside train/CLASS")
    return DeviceImages(train), DeviceImages(test)


class DeviceImages:
    """All images of a set as uint8 (N, 3, S + 8, S + 8), black around, and their labels, at first on the CPU.

    Takes 3 (S + 8)^2 bytes an image: 230 MiB for CIFAR-10's 50,000. Raises DataError naming the first file that is no
    image.
    """

    def __init__(self, images: ImageSet) -> None:
        pixels = images.pixels(range(len(images.labels)))
        self.classes, self._labels, self._size = images.classes, images.labels, pixels.shape[-1]
        self._bordered = F.pad(pixels, (BORDER,) * 4)
        self._channels_last = False
        self._mean, self._std = (torch.tensor(values).view(3, 1, 1) for values in images.scale)

    def to(self, device: str, memory_format: torch.memory_format = torch.preserve_format) -> DeviceImages:
        """The same images on a device; their batches are in channels_last where that is said, else contiguous."""
        moved = copy.copy(self)
        moved._channels_last = memory_format == torch.channels_last
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(moved, name, value.to(device))
        return moved

    def __len__(self) -> int:
        return len(self._labels)

    def epoch(self, batch: int, seed: int, *, flip: bool) -> Iterator[Batch]:
        """Shuffled, cropped and flipped batches: float32 (batch, 3, S, S) and int64 (batch,). The last, smaller one is
        left out. Does not wait for the device after the first."""
        generator, count, device = torch.Generator().manual_seed(seed), len(self), self._labels.device
        order = torch.randperm(count, generator=generator).to(device)
        corners = torch.randint(2 * BORDER + 1, (2, count), generator=generator).to(device)
        flipped = (torch.rand(count, generator=generator) < 0.5).to(device) if flip else None
        for start in range(0, count - batch + 1, batch):
            chosen = order[start : start + batch]
            turned = None if flipped is None else flipped[chosen]
            yield self._inputs(chosen, corners[:, chosen], turned), self._labels[chosen]

    def whole(self, batch: int) -> Iterator[Batch]:
        """All images in order and as they are, the last batch perhaps smaller."""
        for chosen in torch.arange(len(self), device=self._labels.device).split(batch):
            middle = torch.full((2, len(chosen)), BORDER, device=chosen.device)
            yield self._inputs(chosen, middle, None), self._labels[chosen]

    def _inputs(self, chosen: torch.Tensor, corners: torch.Tensor, flipped: torch.Tensor | None) -> torch.Tensor:
        along = torch.arange(self._size, device=chosen.device)
        columns = along if flipped is None else torch.where(flipped[:, None], along.flip(0), along)
        rows, columns = corners[0, :, None] + along, corners[1, :, None] + columns
        cut = self._bordered[chosen[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # (batch, S, S, 3)
        chosen_format = torch.channels_last if self._channels_last else torch.contiguous_format
        images = cut.permute(0, 3, 1, 2).contiguous(memory_format=chosen_format)
        return (images.float() / 255 - self._mean) / self._std
