"""What the codecs cost on a device, as passes over the dense tensor: measured. Pure data.

A *pass* is the time in which a device copy reads or writes the dense tensor's bytes once: bytes / copy bandwidth. So a
plain ``relu`` is two passes, and a codec at the roofline takes traffic / dense bytes of them; what is above that is
its efficiency. Figures are the medians of the layer benchmark on an NVIDIA H200 (torch 2.11, triton 3.6, 512 MiB, copy
4,152 GB/s, commit 659ed66) times the copy bandwidth of the same run over the dense bytes; sparse ones at density 0.5.
Rows measured since (bench/results/2026-11-20-h200-layers.jsonl) are about as fast or faster, sparse ones up to three
times (docs/log.md).
``relu_backward`` holds all three tensors of a ReLU's backward: its payload, the gradient read and the gradient written.

Other devices are taken to be as far from their own copy bandwidth as this one is; fp16 tensors to cost what bf16 costs.
"""

from __future__ import annotations

from dataclasses import dataclass

MEASURED_DENSITY = 0.5
RELU_BACKWARD_PASSES = 3.0
"""PyTorch's ``threshold_backward``: output and gradient read, gradient written; 103 % of a copy's speed."""


@dataclass(frozen=True)
class Passes:
    """Passes of each direction; ``pack`` is what settles a sparse encoding of unknown size into exact arrays."""

    encode: float
    pack: float
    decode: float
    relu_backward: float = 0.0


P = Passes

# codec: (fp32, bf16 and fp16)
_MEASURED: dict[str, tuple[Passes, Passes]] = {
    "mask1": (P(1.06, 0.00, 1.13, 2.10), P(1.09, 0.00, 1.15, 2.10)),
    "zvc": (P(1.67, 1.22, 1.94, 2.62), P(2.13, 1.33, 2.26, 3.22)),
    "csr": (P(1.92, 2.14, 1.93, 3.58), P(2.42, 3.08, 2.43, 4.51)),
    "fp16": (P(1.47, 0.00, 1.55), P(2.01, 0.00, 2.03)),
    "fp10": (P(1.32, 0.00, 1.40), P(1.77, 0.00, 1.69)),
    "fp8": (P(1.24, 0.00, 1.31), P(1.70, 0.00, 1.56)),
    "fp16s": (P(1.48, 0.00, 1.57), P(2.20, 0.00, 2.00)),
    "fp10s": (P(1.38, 0.00, 1.40), P(2.38, 0.00, 1.71)),
    "fp8s": (P(1.26, 0.00, 1.34), P(2.11, 0.00, 1.60)),
    "fp16t": (P(2.62, 0.00, 1.55), P(3.17, 0.00, 2.00)),
    "fp10t": (P(2.46, 0.00, 1.40), P(3.05, 0.00, 1.69)),
    "fp8t": (P(2.38, 0.00, 1.31), P(2.88, 0.00, 1.56)),
    "zvc+fp16": (P(1.52, 0.73, 1.60, 2.40), P(2.71, 1.33, 2.65, 3.22)),
    "zvc+fp10": (P(1.52, 1.19, 1.86, 2.62), P(2.98, 2.19, 3.27, 3.48)),
    "zvc+fp8": (P(1.47, 0.52, 1.50, 2.31), P(2.94, 0.89, 2.18, 3.04)),
    "zvc+fp16s": (P(1.66, 3.08, 1.66, 2.41), P(2.13, 4.76, 3.27, 3.22)),
    "zvc+fp10s": (P(1.66, 1.98, 2.19, 2.63), P(2.13, 2.87, 4.72, 3.50)),
    "zvc+fp8s": (P(1.67, 3.33, 1.62, 2.31), P(2.13, 4.75, 2.93, 3.04)),
    "zvc+fp16t": (P(1.67, 3.85, 1.69, 2.40), P(2.12, 5.64, 2.86, 3.22)),
    "zvc+fp10t": (P(1.66, 2.43, 1.88, 2.62), P(2.13, 3.18, 3.48, 3.48)),
    "zvc+fp8t": (P(1.67, 2.98, 1.49, 2.31), P(2.12, 3.96, 2.31, 3.04)),
    "csr+fp16": (P(1.62, 1.59, 1.73, 3.35), P(2.62, 3.08, 2.74, 4.52)),
    "csr+fp10": (P(1.62, 2.04, 2.20, 3.59), P(2.82, 3.94, 3.98, 4.84)),
    "csr+fp8": (P(1.48, 1.17, 1.54, 3.22), P(2.55, 2.17, 2.36, 3.84)),
    "csr+fp16s": (P(1.92, 3.99, 1.99, 3.35), P(2.43, 6.50, 3.70, 4.51)),
    "csr+fp10s": (P(1.91, 2.89, 3.07, 3.59), P(2.43, 4.61, 5.31, 4.84)),
    "csr+fp8s": (P(1.91, 4.23, 1.82, 3.22), P(2.42, 6.43, 3.17, 3.85)),
    "csr+fp16t": (P(1.91, 4.77, 1.74, 3.35), P(2.43, 7.38, 2.81, 4.52)),
    "csr+fp10t": (P(1.91, 3.35, 2.23, 3.59), P(2.42, 4.92, 3.92, 4.84)),
    "csr+fp8t": (P(1.91, 3.90, 1.54, 3.22), P(2.42, 5.67, 2.44, 3.85)),
}

# Change of the passes for one unit of density, from the same benchmark at densities 0.1 and 0.5. The compositions run
# the same kernels and were measured at 0.5 alone: they get their family's slopes.
_SLOPES: dict[str, tuple[Passes, Passes]] = {
    "zvc": (P(1.02, 1.96, 1.32, 1.22), P(0.96, 1.47, 1.39, 1.00)),
    "csr": (P(1.26, 3.93, 1.50, 2.89), P(1.33, 5.56, 2.18, 4.27)),
}


def passes(codec: str, itemsize: int, density: float | None) -> Passes | None:
    """Passes of a codec over a tensor of ``itemsize`` bytes an element at a density (None: no zeros at all); None for a
    codec that has no row: ``dense``, ``bits`` and the max-pool maps, whose operators make them.

    Below density 0.1 and above 0.5 the line through the two measured points goes on; never below a tenth of the
    figure at 0.5.
    """
    wide = 0 if itemsize >= 4 else 1
    if codec not in _MEASURED:
        return None
    row = _MEASURED[codec][wide]
    slopes = _SLOPES.get(codec.partition("+")[0])
    if slopes is None:
        return row
    delta = (1.0 if density is None else density) - MEASURED_DENSITY
    slope = slopes[wide]

    def at(name: str) -> float:
        base = getattr(row, name)
        return max(0.1 * base, base + delta * getattr(slope, name))

    return Passes(at("encode"), at("pack"), at("decode"), at("relu_backward"))
