"""How small zero-value compression, run-length encoding and DEFLATE make activations, by layout (cDMA's comparators).

A tensor in one of its layouts is cut into windows of 4 KiB, each compressed alone, as a DMA engine would. Bytes of a
window of n elements of b bytes, z of them not zero by bit pattern (the ratio is the dense bytes over these):

| coder | bytes |
|---|---|
| `zvc` | a bit an element in 32-bit masks, and the non-zeros: 4 ceil(n / 32) + b z |
| `rle` | a byte for every run of up to 128 zeros or of up to 128 non-zeros (our reading), and the non-zeros |
| `deflate1`, `deflate6` | zlib's DEFLATE of the bytes at that level, without header and checksum |
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

WINDOW_BYTES = 4096
LONGEST_RUN = 128
LAYOUTS = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 2, 3, 1), "CHWN": (1, 2, 3, 0)}
"""The dimensions of an NCHW tensor in the order in which each layout has them in memory."""
WATCHED = (nn.ReLU, nn.MaxPool2d)
"""Modules whose outputs have zeros in them."""
Row = dict[str, Any]


def zvc_bytes(words: np.ndarray) -> int:
    """Bytes of integer words (W, n), a row a window, n at most 32 or a multiple of it."""
    rows, n = words.shape
    return rows * -(-n // 32) * 4 + int(np.count_nonzero(words)) * words.itemsize


def rle_bytes(words: np.ndarray) -> int:
    """Bytes of integer words (W, n), a row a window: runs end with their window."""
    zero = words == 0
    begins = np.ones(zero.shape, dtype=bool)
    begins[:, 1:] = zero[:, 1:] != zero[:, :-1]
    lengths = np.diff(np.flatnonzero(begins), append=zero.size)
    return int((-(-lengths // LONGEST_RUN)).sum()) + int(np.count_nonzero(words)) * words.itemsize


def deflate_bytes(words: np.ndarray, level: int) -> int:
    """Bytes of integer words (W, n), a row a window, at zlib's ``level``, less zlib's own header and checksum."""
    return sum(len(zlib.compress(window.tobytes(), level)) - 6 for window in words)


CODERS: dict[str, Callable[[np.ndarray], int]] = {"zvc": zvc_bytes, "rle": rle_bytes}
CODERS |= {f"deflate{level}": partial(deflate_bytes, level=level) for level in (1, 6)}


def windows(x: torch.Tensor, layout: str, most: int) -> np.ndarray:
    """Integer words (W, n) of x fp32/bf16/fp16 (N, C, H, W): at most ``most`` whole windows of it in ``layout``, evenly
    spread, on the host. A tensor of less than a window is one; what follows the last whole window is left out."""
    bits = x.detach().permute(LAYOUTS[layout]).contiguous().flatten()
    words = bits.view(torch.int32 if x.itemsize == 4 else torch.int16).cpu().numpy()
    n = min(WINDOW_BYTES // words.itemsize, words.size)
    whole = words[: words.size // n * n].reshape(-1, n)
    return whole[np.linspace(0, len(whole) - 1, min(most, len(whole))).astype(np.int64)]


def ratio_rows(source: str, layer: str, x: torch.Tensor, most: int = 256) -> list[Row]:
    """A row a layout: every coder's ratio of x (N, C, H, W), not empty, over ``most`` windows at most."""
    density = float(torch.count_nonzero(x)) / x.numel()
    about = {"kind": "ratio", "source": source, "layer": layer, "nbytes": x.nbytes, "density": density}
    cut = {layout: windows(x, layout, most) for layout in LAYOUTS}
    return [{**about, "layout": k, **{c: w.nbytes / size(w) for c, size in CODERS.items()}} for k, w in cut.items()]


def summed(rows: list[Row]) -> list[Row]:
    """A row a layout for all layers of the rows together, ``layer`` being ``all``: their bytes over the compressed."""
    found = []
    for layout in LAYOUTS:
        of = [r for r in rows if r["layout"] == layout]
        nbytes = sum(r["nbytes"] for r in of)
        ratios = {name: nbytes / sum(r["nbytes"] / r[name] for r in of) for name in CODERS}
        density = sum(r["nbytes"] * r["density"] for r in of) / nbytes
        found.append({**of[0], "layer": "all", "nbytes": nbytes, "density": density, **ratios})
    return found


@contextmanager
def watched(model: nn.Module, see: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """``see(name, output)`` at every 4-D output of a module of WATCHED, before the next one, which may overwrite it."""

    def hook(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: see(name, output) if output.dim() == 4 else None

    handles = [m.register_forward_hook(hook(name)) for name, m in model.named_modules() if isinstance(m, WATCHED)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
