"""What the codecs cost on a device, as passes over the dense tensor: measured. Pure data.

A *pass* is the time in which a device copy reads or writes the dense tensor's bytes once: bytes / copy bandwidth. So a
plain ``relu`` is two passes. Figures are those of ``python -m bench.codec_costs``, which made both tables of the layer
benchmark's rows from an NVIDIA H200 (bench/results/2026-11-20-h200-layers*.jsonl: torch 2.11, triton 3.6, 64 to 512
MiB, commit 5d000c8): the time of a further byte, over that of a copy's (4,198 GB/s). What a launch takes is not in
them. ``relu_backward`` holds all three tensors of a ReLU's backward: its payload, the gradient read and written.

Other devices are taken to be as far from their own copy bandwidth as this one is; fp16 tensors to cost what bf16 costs.
"""

from __future__ import annotations

from typing import NamedTuple

MEASURED_DENSITY = 0.5
RELU_BACKWARD_PASSES = 3.0
"""PyTorch's ``threshold_backward``: output and gradient read, gradient written; 105 % of a copy's speed."""


class Passes(NamedTuple):
    """Passes of each direction; ``pack`` is what settles a sparse encoding of unknown size into exact arrays."""

    encode: float
    pack: float
    decode: float
    relu_backward: float = 0.0


P = Passes

# codec: (fp32, bf16 and fp16); sparse ones at MEASURED_DENSITY
MEASURED: dict[str, tuple[Passes, Passes]] = {
    "mask1": (P(0.98, 0.00, 1.12, 2.09), P(1.01, 0.00, 1.14, 2.09)),
    "zvc": (P(1.52, 1.13, 1.57, 2.47), P(1.58, 1.25, 1.65, 2.47)),
    "csr": (P(1.82, 1.52, 1.67, 2.54), P(2.31, 2.19, 1.85, 2.67)),
    "fp16": (P(1.43, 0.00, 1.53), P(1.98, 0.00, 2.01)),
    "fp10": (P(1.25, 0.00, 1.40), P(1.75, 0.00, 1.68)),
    "fp8": (P(1.18, 0.00, 1.30), P(1.43, 0.00, 1.55)),
    "fp16s": (P(1.43, 0.00, 1.57), P(2.06, 0.00, 1.98)),
    "fp10s": (P(1.25, 0.00, 1.39), P(1.78, 0.00, 1.69)),
    "fp8s": (P(1.18, 0.00, 1.34), P(1.43, 0.00, 1.58)),
    "zvc+fp16": (P(1.24, 0.65, 1.34, 2.26), P(1.58, 1.25, 1.66, 2.47)),
    "zvc+fp10": (P(1.24, 1.09, 1.27, 2.21), P(1.58, 2.15, 1.65, 2.44)),
    "zvc+fp8": (P(1.12, 0.43, 1.23, 2.22), P(1.30, 0.82, 1.43, 2.26)),
    "zvc+fp16s": (P(1.52, 1.21, 1.34, 2.27), P(1.59, 1.73, 1.70, 2.47)),
    "zvc+fp10s": (P(1.52, 1.80, 1.27, 2.21), P(1.58, 2.21, 1.79, 2.44)),
    "zvc+fp8s": (P(1.52, 1.13, 1.22, 2.22), P(1.59, 1.45, 1.46, 2.26)),
    "csr+fp16": (P(1.54, 1.12, 1.44, 2.34), P(2.31, 2.18, 1.86, 2.68)),
    "csr+fp10": (P(1.55, 1.56, 1.40, 2.28), P(2.31, 3.06, 1.95, 2.58)),
    "csr+fp8": (P(1.49, 0.87, 1.33, 2.24), P(1.95, 1.69, 1.67, 2.46)),
    "csr+fp16s": (P(1.82, 1.37, 1.44, 2.33), P(2.30, 2.20, 1.92, 2.67)),
    "csr+fp10s": (P(1.82, 2.19, 1.41, 2.28), P(2.31, 3.14, 1.98, 2.58)),
    "csr+fp8s": (P(1.82, 1.27, 1.32, 2.24), P(2.31, 1.88, 1.70, 2.45)),
}

ASSUMED = {"int4s": "fp8s", "int2s": "fp8s"}
"""Not measured: taken to cost what another does."""

# What a family's codecs take where nothing is stored: the line through densities 0.1 and 0.5 of its lossless one.
EMPTY: dict[str, tuple[Passes, Passes]] = {
    "zvc": (P(1.03, 0.04, 1.12, 2.04), P(1.15, 0.07, 1.21, 2.05)),
    "csr": (P(1.10, 0.10, 1.11, 2.01), P(1.53, 0.22, 1.16, 2.02)),
}


def passes(codec: str, itemsize: int, density: float | None) -> Passes:
    """Passes of a codec over a tensor of ``itemsize`` bytes an element at a density (None: no zeros at all). Raises
    KeyError for one that has no row: ``dense``, ``bits`` and the max-pool maps, whose operators make them. Of a sparse
    codec the line through what it takes with nothing stored and at the measured density, which goes on."""
    wide = 0 if itemsize >= 4 else 1
    row, family = MEASURED[ASSUMED.get(codec, codec)][wide], EMPTY.get(codec.partition("+")[0])
    if family is None:
        return row
    share = (1.0 if density is None else density) / MEASURED_DENSITY
    return Passes(*(at + (share - 1) * (at - empty) for at, empty in zip(row, family[wide], strict=True)))
