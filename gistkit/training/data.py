"""Images to train on: a folder with one sub-folder a class, or scikit-learn's bundled ``digits``.

Every image comes as 3 x S x S: the shorter side is resized to S, the middle is cut out (bilinear), grey is repeated
over the channels. Batches are normalised by ImageNet's mean and deviation, digits by their own. The order is a
function of the seed alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from gistkit.errors import DataError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DIGITS_MEAN, DIGITS_STD = (0.305,) * 3, (0.376,) * 3
CACHE_BYTES = 256 * 2**20
DIGITS_TEST_EVERY = 5


class ImageSet(Protocol):
    """Labelled images of one size: ``labels`` int64 (N,), indices into ``classes``; ``pixels`` gives some of them.

    ``mean`` and ``std`` are those of each channel, of values from 0 to 1.
    """

    classes: tuple[str, ...]
    labels: torch.Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def pixels(self, indices: Sequence[int]) -> torch.Tensor:
        """Images as uint8 (len(indices), 3, S, S)."""
        ...


class Digits:
    """Handwritten digits, 8 x 8 and grey, enlarged to S x S. Every fifth of the 1,797 is for testing."""

    mean, std = DIGITS_MEAN, DIGITS_STD

    def __init__(self, image_size: int, test: bool) -> None:
        bunch: Any = _load_digits()
        chosen = torch.arange(len(bunch.target)) % DIGITS_TEST_EVERY == 0
        chosen = chosen if test else ~chosen
        self.classes = tuple(str(name) for name in bunch.target_names)
        self.labels = torch.as_tensor(bunch.target, dtype=torch.int64)[chosen]
        self._images = torch.as_tensor(bunch.images, dtype=torch.float32)[chosen]
        self._image_size = image_size

    def pixels(self, indices: Sequence[int]) -> torch.Tensor:
        """Images as uint8 (len(indices), 3, S, S)."""
        # Values are 0 to 16.
        grey = self._images[list(indices)].unsqueeze(1) * (255 / 16)
        size = (self._image_size, self._image_size)
        enlarged = F.interpolate(grey, size=size, mode="bilinear", align_corners=False)
        return enlarged.round().to(torch.uint8).expand(-1, 3, -1, -1)


class ImageFolder:
    """``root/CLASS/**``: images by Pillow, decoded when first asked for and kept where all of them fit 256 MiB."""

    mean, std = IMAGENET_MEAN, IMAGENET_STD

    def __init__(self, root: Path, image_size: int, classes: tuple[str, ...] | None = None) -> None:
        self.classes = _classes(root) if classes is None else classes
        unknown = sorted(set(_classes(root)) - set(self.classes))
        if unknown:
            raise DataError(f"{root} has classes that the training images lack: {', '.join(unknown)}; remove them")
        pillow = _pillow()
        extensions = frozenset(ext for ext, kind in pillow.registered_extensions().items() if kind in pillow.OPEN)
        found = [(path, label) for label in _classes(root) for path in _images_below(root / label, extensions)]
        self.labels = torch.tensor([self.classes.index(label) for _, label in found])
        self._paths = [path for path, _ in found]
        self._image_size = image_size
        shape = (len(found), 3, image_size, image_size)
        self._cache = torch.empty(shape, dtype=torch.uint8) if _volume(shape) <= CACHE_BYTES else None
        self._cached = [False] * len(found)

    def pixels(self, indices: Sequence[int]) -> torch.Tensor:
        """Images as uint8 (len(indices), 3, S, S). Raises DataError naming the first file that is no image."""
        indices = [int(i) for i in indices]
        if self._cache is None:
            return torch.stack(self._decode(indices))
        missing = [i for i in dict.fromkeys(indices) if not self._cached[i]]
        for i, image in zip(missing, self._decode(missing), strict=True):
            self._cache[i] = image
            self._cached[i] = True
        return self._cache[indices]

    def _decode(self, indices: list[int]) -> list[torch.Tensor]:
        # Pillow decodes and resizes outside Python's lock.
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            return list(pool.map(lambda i: read_image(self._paths[i], self._image_size), indices))


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


def batches(images: ImageSet, batch: int, steps: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """``steps`` batches of (float32 (batch, 3, S, S), int64 (batch,)) on the CPU, over shuffled epochs.

    An epoch's last, smaller batch is left out. Raises DataError where there are fewer images than ``batch``.
    """
    count = len(images.labels)
    if batch > count:
        raise DataError(f"a batch of {batch} needs as many images, there are {count}; use a batch of at most {count}")
    generator = torch.Generator().manual_seed(seed)
    per_epoch = count // batch
    order = torch.empty(0, dtype=torch.int64)
    for step in range(steps):
        i = step % per_epoch
        if i == 0:
            order = torch.randperm(count, generator=generator)
        chosen = order[i * batch : (i + 1) * batch]
        yield inputs(images, chosen.tolist()), images.labels[chosen]


def inputs(images: ImageSet, indices: Sequence[int]) -> torch.Tensor:
    """Some of the images as a network takes them: float32 (N, 3, S, S) of about zero mean and unit deviation."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (images.mean, images.std))
    return (images.pixels(indices).float() / 255 - mean) / std


def read_image(path: Path, image_size: int) -> torch.Tensor:
    """One image as uint8 (3, image_size, image_size). Raises DataError naming the file where it is none."""
    pillow = _pillow()
    try:
        with pillow.open(path) as image:
            # JPEG decodes at a fraction of the size at a fraction of the cost; a no-op for the rest.
            image.draft("RGB", (image_size, image_size))
            rgb = image.convert("RGB")
        scale = image_size / min(rgb.size)
        width, height = (max(image_size, round(side * scale)) for side in rgb.size)
        left, top = (width - image_size) // 2, (height - image_size) // 2
        box = tuple(edge / scale for edge in (left, top, left + image_size, top + image_size))
        box = (box[0], box[1], min(box[2], rgb.width), min(box[3], rgb.height))
        cut = rgb.resize((image_size, image_size), pillow.Resampling.BILINEAR, box=box)
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image ({error}); replace or remove it") from error
    rows = torch.frombuffer(bytearray(cut.tobytes()), dtype=torch.uint8).view(image_size, image_size, 3)
    return rows.permute(2, 0, 1).contiguous()


def _classes(root: Path) -> tuple[str, ...]:
    names = sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        raise DataError(f"{root} has no class folders; put the images of each class into a sub-folder of its own")
    return tuple(names)


def _images_below(folder: Path, extensions: frozenset[str]) -> list[Path]:
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in extensions and not p.name.startswith("."))
    if not paths:
        raise DataError(f"class folder {folder} has no images; add some (PNG, JPEG, ...) or remove it")
    return paths


def _volume(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("reading images needs Pillow; pip install 'gistkit[images]'") from error
    return Image


def _load_digits() -> Any:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("the digits need scikit-learn; pip install 'gistkit[digits]'") from error
    return load_digits()
