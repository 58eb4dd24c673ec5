"""A folder of image files, which may come from anybody: only regular files of common formats and sizes are opened.

Every image comes as 3 x S x S: the shorter side is resized to S, the middle is cut out (bilinear), grey is repeated
over the channels.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from gistkit.errors import DataError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CACHE_BYTES = 256 * 2**20
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""What Pillow may take a file for, whatever its name says: its other decoders start programs or are hardly tried."""
MOST_PIXELS, MOST_BYTES = 2**26, 2**28
"""Of one file: 8,192 x 8,192 pixels, 256 MiB."""


class ImageFolder:
    """``root/CLASS/**``: images by Pillow, decoded when first asked for and kept where all of them fit 256 MiB."""

    mean, std = IMAGENET_MEAN, IMAGENET_STD

    def __init__(self, root: Path, image_size: int, classes: tuple[str, ...] | None = None) -> None:
        self.name = str(root)
        found = {label: _images_below(root / label, _extensions()) for label in _classes(root)}
        self.classes = tuple(found) if classes is None else classes
        unknown = [label for label in found if label not in self.classes]
        if unknown:
            raise DataError(f"{root} has classes that the training images lack: {', '.join(unknown)}; remove them")
        self._paths = [path for paths in found.values() for path in paths]
        self.labels = torch.tensor([self.classes.index(label) for label, paths in found.items() for _ in paths])
        self._image_size = image_size
        shape = (len(self._paths), 3, image_size, image_size)
        self._cache = torch.empty(shape, dtype=torch.uint8) if torch.Size(shape).numel() <= CACHE_BYTES else None
        self._cached = [False] * len(self._paths)

    def check(self, drawn: Collection[int]) -> None:
        """Open every file, which reads its header, and decode those of these indices.

        A truncated file has a whole header, so that only decoding finds it; decoding all of a large folder would take
        longer than the training that draws a few of its images. Raises DataError naming the first bad file.
        """

        def look(i: int) -> None:
            if i in drawn:
                self.pixels([i])
            else:
                open_image(self._paths[i]).close()

        with warnings.catch_warnings(), ThreadPoolExecutor(_workers()) as pool:
            # Pillow's own limit only warns at first; MOST_PIXELS is below it.
            warnings.simplefilter("ignore", _pillow().DecompressionBombWarning)
            list(pool.map(look, range(len(self._paths))))

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
        if len(indices) < 2:
            return [read_image(self._paths[i], self._image_size) for i in indices]
        # Pillow decodes and resizes outside Python's lock.
        with ThreadPoolExecutor(_workers()) as pool:
            return list(pool.map(lambda i: read_image(self._paths[i], self._image_size), indices))


def open_image(path: Path) -> Any:
    """The file as a Pillow image whose header is read. Raises DataError, naming the file, for what is no regular file
    (a FIFO or a device would be waited for), larger than ``MOST_BYTES`` or ``MOST_PIXELS``, or of none of ``FORMATS``.
    """
    pillow = _pillow()
    try:
        if not path.is_file():
            raise DataError(f"{path} is no regular file; replace or remove it")
        nbytes = path.stat().st_size
        if nbytes > MOST_BYTES:
            raise DataError(f"{path} has {nbytes:,} bytes, more than {MOST_BYTES:,}; shrink or remove it")
        image = pillow.open(path, formats=FORMATS)
    except DataError:
        raise
    except Exception as error:  # decoders raise whatever a broken file leads them to
        raise _unreadable(path, error) from error
    width, height = image.size
    if width * height > MOST_PIXELS:
        image.close()
        raise DataError(f"{path} has {width} x {height} pixels, more than {MOST_PIXELS:,}; shrink or remove it")
    return image


def read_image(path: Path, image_size: int) -> torch.Tensor:
    """One image as uint8 (3, image_size, image_size). Raises DataError naming the file where it is none."""
    with open_image(path) as image:
        try:
            # JPEG decodes at a fraction of the size at a fraction of the cost; a no-op for the rest.
            image.draft("RGB", (image_size, image_size))
            cut = _middle(image.convert("RGB"), image_size)
        except Exception as error:
            raise _unreadable(path, error) from error
    rows = torch.frombuffer(bytearray(cut.tobytes()), dtype=torch.uint8).view(image_size, image_size, 3)
    return rows.permute(2, 0, 1).contiguous()


def _middle(rgb: Any, image_size: int) -> Any:
    """The middle of a Pillow image whose shorter side becomes ``image_size``."""
    scale = image_size / min(rgb.size)
    width, height = (max(image_size, round(side * scale)) for side in rgb.size)
    left, top = (width - image_size) // 2, (height - image_size) // 2
    box = tuple(edge / scale for edge in (left, top, left + image_size, top + image_size))
    box = (box[0], box[1], min(box[2], rgb.width), min(box[3], rgb.height))
    return rgb.resize((image_size, image_size), _pillow().Resampling.BILINEAR, box=box)


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read as an image ({error}); replace or remove it")


def _classes(root: Path) -> tuple[str, ...]:
    names = sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        raise DataError(f"{root} has no class folders; put the images of each class into a sub-folder of its own")
    return tuple(names)


def _images_below(folder: Path, extensions: frozenset[str]) -> list[Path]:
    named = (p for p in folder.rglob("*") if p.suffix.lower() in extensions and not p.name.startswith("."))
    paths = sorted(p for p in named if not p.is_dir())
    if not paths:
        raise DataError(f"class folder {folder} has no images; add some (PNG, JPEG, ...) or remove it")
    return paths


def _extensions() -> frozenset[str]:
    return frozenset(ext for ext, kind in _pillow().registered_extensions().items() if kind in FORMATS)


def _workers() -> int:
    return min(8, os.cpu_count() or 1)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("reading images needs Pillow; pip install 'gistkit[images]'") from error
    return Image
