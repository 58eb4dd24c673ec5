"""Images to train on: a folder with one sub-folder a class, or scikit-learn's bundled ``digits``.

Every image comes as 3 x S x S: the shorter side is resized to S, the middle is cut out (bilinear), grey is repeated
over the channels. Batches are normalised by ImageNet's mean and deviation, digits by their own. The order is a function
of the seed alone. Files may come from anybody: only regular files of common formats are opened.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from gistkit.errors import DataError

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DIGITS_TEST_EVERY = 5
CACHE_BYTES = 256 * 2**20
BILINEAR = 2  # as Pillow has it
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""What Pillow may take a file for, whatever its name says: its other decoders start programs or are hardly tried."""


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images of one size: ``labels`` int64 (N,), indices into ``classes``; ``read(i)`` gives the i-th image,
    uint8 (3, S, S), which is kept within 256 MiB.

    ``name`` is for people. ``scale``: mean and deviation of each channel, of values from 0 to 1.
    """

    name: str
    classes: tuple[str, ...]
    labels: torch.Tensor
    scale: tuple[tuple[float, ...], tuple[float, ...]]
    read: Callable[[int], torch.Tensor]

    def pixels(self, indices: Sequence[int]) -> torch.Tensor:
        """Images as uint8 (len(indices), 3, S, S). Raises DataError naming the first file that is no image."""
        return torch.stack(list(self._in_threads(indices)))

    def check(self, indices: Iterable[int]) -> None:
        """Decode these images once. Raises DataError naming the first file that is no image, or is cut short."""
        for _ in self._in_threads(indices):
            pass

    def _in_threads(self, indices: Iterable[int]) -> Iterator[torch.Tensor]:
        # Pillow decodes and resizes outside Python's lock.
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            yield from pool.map(self.read, indices)

    def inputs(self, indices: Sequence[int]) -> torch.Tensor:
        """Images as a network takes them: float32 (N, 3, S, S) of about zero mean and unit deviation."""
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in self.scale)
        return (self.pixels(indices).float() / 255 - mean) / std


def open_images(source: str, image_size: int) -> tuple[ImageSet, ImageSet | None]:
    """(training images, test images or None) of ``digits`` or of a directory.

    A directory holds ``train/CLASS`` and perhaps ``test/CLASS`` (or ``val/CLASS``), or the class folders themselves.
    Raises DataError where it is missing, has no class folders, or a class has no image, and where the extra that reads
    the source (``gistkit[images]``, ``gistkit[digits]``) is not installed. No image is decoded here.
    """
    if source == "digits":
        return _digits(image_size, test=False), _digits(image_size, test=True)
    root = Path(source)
    if not root.is_dir():
        what = "is not a directory" if root.exists() else "does not exist"
        raise DataError(f"data directory {source} {what}; give a folder with one sub-folder a class, or 'digits'")
    if not (root / "train").is_dir():
        return _folder(root, image_size), None
    train = _folder(root / "train", image_size)
    held_out = next((root / name for name in ("test", "val") if (root / name).is_dir()), None)
    return train, None if held_out is None else _folder(held_out, image_size, train.classes)


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
        yield images.inputs(chosen.tolist()), images.labels[chosen]


def _digits(image_size: int, test: bool) -> ImageSet:
    """Handwritten digits, 8 x 8 and grey, enlarged to S x S. Every fifth of the 1,797 is for testing."""
    bunch = _extra("sklearn.datasets", "digits").load_digits()
    chosen = (torch.arange(len(bunch.target)) % DIGITS_TEST_EVERY == 0) == test
    grey = torch.as_tensor(bunch.images, dtype=torch.float32)[chosen, None] * (255 / 16)  # values are 0 to 16

    def read(i: int) -> torch.Tensor:
        size = (image_size, image_size)
        enlarged = F.interpolate(grey[i : i + 1], size=size, mode="bilinear", align_corners=False)
        return enlarged[0].round().to(torch.uint8).expand(3, -1, -1)

    name, classes = "every fifth digit" if test else "digits", tuple(map(str, bunch.target_names))
    labels = torch.as_tensor(bunch.target, dtype=torch.int64)[chosen]
    return ImageSet(name, classes, labels, ((0.305,) * 3, (0.376,) * 3), _kept(read, image_size))


def _folder(root: Path, image_size: int, classes: tuple[str, ...] | None = None) -> ImageSet:
    """``root/CLASS/**``: images by Pillow."""
    found = {p.name: _images_below(p) for p in sorted(root.iterdir()) if p.is_dir() and p.name[0] != "."}
    if not found:
        raise DataError(f"{root} has no class folders; put the images of each class into a sub-folder of its own")
    classes = classes or tuple(found)
    unknown = [label for label in found if label not in classes]
    if unknown:
        raise DataError(f"{root} has classes that the training images lack: {', '.join(unknown)}; remove them")
    paths = [path for below in found.values() for path in below]
    labels = torch.tensor([classes.index(label) for label, below in found.items() for _ in below])

    read = _kept(lambda i: read_image(paths[i], image_size), image_size)
    return ImageSet(str(root), classes, labels, IMAGENET, read)


def read_image(path: Path, image_size: int) -> torch.Tensor:
    """One image as uint8 (3, image_size, image_size). Raises DataError, naming the file, for what is no regular file (a
    FIFO or a device would be waited for), of none of ``FORMATS``, or cannot be decoded."""
    pillow, operations = _extra("PIL.Image", "images"), _extra("PIL.ImageOps", "images")
    if not path.is_file():
        raise DataError(f"{path} is no regular file; replace or remove it")
    try:
        with pillow.open(path, formats=FORMATS) as image:
            # JPEG decodes at a fraction of the size at a fraction of the cost; a no-op for the rest.
            image.draft("RGB", (image_size, image_size))
            middle = operations.fit(image.convert("RGB"), (image_size, image_size), BILINEAR)
            return torch.from_numpy(np.array(middle)).permute(2, 0, 1).contiguous()
    except Exception as error:  # decoders raise whatever a broken file leads them to
        raise DataError(f"{path} cannot be read as an image ({error}); replace or remove it") from error


def _images_below(folder: Path) -> list[Path]:
    known = _extra("PIL.Image", "images").registered_extensions()
    named = (p for p in folder.rglob("*") if known.get(p.suffix.lower()) in FORMATS and not p.name.startswith("."))
    paths = sorted(p for p in named if not p.is_dir())
    if not paths:
        raise DataError(f"class folder {folder} has no images; add some (PNG, JPEG, ...) or remove it")
    return paths


def _kept(read: Callable[[int], torch.Tensor], image_size: int) -> Callable[[int], torch.Tensor]:
    return lru_cache(CACHE_BYTES // (3 * image_size**2))(read)


def _extra(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"reading these images needs {module}; pip install 'gistkit[{extra}]'") from error
