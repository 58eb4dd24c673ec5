"""Images to train on: a folder with one sub-folder a class, or scikit-learn's bundled ``digits``.

Batches are normalised by ImageNet's mean and deviation, digits by their own. The order is a function of the seed alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from gistkit.errors import DataError
from gistkit.training.folder import ImageFolder

DIGITS_TEST_EVERY = 5


class ImageSet(Protocol):
    """Labelled images of one size: ``labels`` int64 (N,), indices into ``classes``; ``pixels`` gives some of them.

    ``name`` is for people. ``mean`` and ``std`` are those of each channel, of values from 0 to 1.
    """

    name: str
    classes: tuple[str, ...]
    labels: torch.Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def check(self, drawn: Collection[int]) -> None:
        """Look at every image, and decode those of these indices. Raises DataError naming the first bad file."""
        ...

    def pixels(self, indices: Sequence[int]) -> torch.Tensor:
        """Images as uint8 (len(indices), 3, S, S)."""
        ...


class Digits:
    """Handwritten digits, 8 x 8 and grey, enlarged to S x S. Every fifth of the 1,797 is for testing."""

    mean, std = (0.305,) * 3, (0.376,) * 3

    def __init__(self, image_size: int, test: bool) -> None:
        bunch: Any = _load_digits()
        chosen = torch.arange(len(bunch.target)) % DIGITS_TEST_EVERY == 0
        chosen = chosen if test else ~chosen
        self.name = "every fifth digit" if test else "digits"
        self.classes = tuple(str(name) for name in bunch.target_names)
        self.labels = torch.as_tensor(bunch.target, dtype=torch.int64)[chosen]
        self._images = torch.as_tensor(bunch.images, dtype=torch.float32)[chosen]
        self._image_size = image_size

    def check(self, drawn: Collection[int]) -> None:
        """They come with scikit-learn."""

    def pixels(self, indices: Sequence[int]) -> torch.Tensor:
        """Images as uint8 (len(indices), 3, S, S)."""
        # Values are 0 to 16.
        grey = self._images[list(indices)].unsqueeze(1) * (255 / 16)
        size = (self._image_size, self._image_size)
        enlarged = F.interpolate(grey, size=size, mode="bilinear", align_corners=False)
        return enlarged.round().to(torch.uint8).expand(-1, 3, -1, -1)


def open_images(source: str, image_size: int) -> tuple[ImageSet, ImageSet | None]:
    """(training images, test images or None) of ``digits`` or of a directory.

    A directory holds ``train/CLASS`` and perhaps ``test/CLASS`` (or ``val/CLASS``), or the class folders themselves.
    Raises DataError where it is missing, has no class folders, or a class has no image, and where the extra that reads
    the source (``gistkit[images]``, ``gistkit[digits]``) is not installed.
    """
    if source == "digits":
        return Digits(image_size, test=False), Digits(image_size, test=True)
    root = Path(source)
    if not root.is_dir():
        what = "is not a directory" if root.exists() else "does not exist"
        raise DataError(f"data directory {source} {what}; give a folder with one sub-folder a class, or 'digits'")
    if not (root / "train").is_dir():
        return ImageFolder(root, image_size), None
    train = ImageFolder(root / "train", image_size)
    held_out = next((root / name for name in ("test", "val") if (root / name).is_dir()), None)
    return train, None if held_out is None else ImageFolder(held_out, image_size, train.classes)


def orders(count: int, batch: int, steps: int, seed: int) -> Iterator[torch.Tensor]:
    """The indices of ``steps`` batches, int64 (batch,), over shuffled epochs of ``count`` images.

    An epoch's last, smaller batch is left out. Raises DataError where there are fewer images than ``batch``.
    """
    if batch > count:
        raise DataError(f"a batch of {batch} needs as many images, there are {count}; use a batch of at most {count}")
    generator = torch.Generator().manual_seed(seed)
    per_epoch = count // batch
    order = torch.empty(0, dtype=torch.int64)
    for step in range(steps):
        i = step % per_epoch
        if i == 0:
            order = torch.randperm(count, generator=generator)
        yield order[i * batch : (i + 1) * batch]


def batches(images: ImageSet, batch: int, steps: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of :func:`orders`: float32 (batch, 3, S, S) and int64 (batch,), on the CPU."""
    for chosen in orders(len(images.labels), batch, steps, seed):
        yield inputs(images, chosen.tolist()), images.labels[chosen]


def inputs(images: ImageSet, indices: Sequence[int]) -> torch.Tensor:
    """Some of the images as a network takes them: float32 (N, 3, S, S) of about zero mean and unit deviation."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (images.mean, images.std))
    return (images.pixels(indices).float() / 255 - mean) / std


def _load_digits() -> Any:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("the digits need scikit-learn; pip install 'gistkit[digits]'") from error
    return load_digits()
