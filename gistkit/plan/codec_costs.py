"""What the codecs cost on a device, as passes over the dense tensor: measured. Pure data.

A *pass* is the time in which a device copy reads or writes the dense tensor's bytes once: bytes / copy bandwidth. So a
plain ``relu`` is two passes, and a codec at the roofline takes traffic / dense bytes of them; what is above that is
its efficiency. Figures are the medians of the layer benchmark on an NVIDIA H200 (torch 2.11, triton 3.6, 512 MiB, copy
4,151 GB/s, 2026-11-20) times the copy bandwidth of the same run over the dense bytes; sparse ones at density 0.5.
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
    "mask1": (P(1.06, 0.00, 1.13, 2.10), P(1.08, 0.00, 1.15, 2.10)),
    "zvc": (P(1.66, 1.18, 1.94, 2.62), P(2.12, 1.41, 2.27, 3.22)),
    "csr": (P(2.52, 5.17, 2.68, 3.58), P(4.30, 10.07, 3.04, 4.52)),
    "fp16": (P(1.47, 0.00, 1.54), P(2.01, 0.00, 2.02)),
    "fp10": (P(1.35, 0.00, 1.92), P(2.11, 0.00, 2.23)),
    "fp8": (P(1.24, 0.00, 1.31), P(1.70, 0.00, 1.56)),
    "fp16s": (P(1.48, 0.00, 1.57), P(2.20, 0.00, 2.00)),
    "fp10s": (P(2.46, 0.00, 1.58), P(3.71, 0.00, 2.15)),
    "fp8s": (P(1.26, 0.00, 1.34), P(2.11, 0.00, 1.59)),
    "fp16t": (P(2.62, 0.00, 1.55), P(3.17, 0.00, 2.00)),
    "fp10t": (P(2.50, 0.00, 1.94), P(3.42, 0.00, 2.08)),
    "fp8t": (P(2.38, 0.00, 1.30), P(2.88, 0.00, 1.56)),
    "zvc+fp16": (P(1.52, 0.77, 1.60, 2.40), P(2.71, 1.41, 2.65, 3.22)),
    "zvc+fp10": (P(1.52, 1.23, 1.86, 2.62), P(2.98, 2.30, 3.26, 3.48)),
    "zvc+fp8": (P(1.47, 0.84, 1.50, 2.31), P(2.94, 1.56, 2.18, 3.04)),
    "zvc+fp16s": (P(1.67, 3.04, 1.66, 2.40), P(2.12, 4.85, 3.27, 3.22)),
    "zvc+fp10s": (P(1.66, 2.46, 2.19, 2.62), P(2.12, 3.42, 4.72, 3.47)),
    "zvc+fp8s": (P(1.66, 3.30, 1.61, 2.31), P(2.13, 4.84, 2.93, 3.04)),
    "zvc+fp16t": (P(1.67, 3.82, 1.69, 2.40), P(2.12, 5.73, 2.87, 3.22)),
    "zvc+fp10t": (P(1.66, 2.42, 1.87, 2.62), P(2.12, 3.22, 3.47, 3.48)),
    "zvc+fp8t": (P(1.66, 2.95, 1.49, 2.31), P(2.13, 4.04, 2.31, 3.04)),
    "csr+fp16": (P(2.32, 5.17, 2.45, 3.35), P(4.16, 10.10, 3.06, 4.52)),
    "csr+fp10": (P(2.32, 5.62, 2.68, 3.59), P(4.22, 10.99, 3.55, 4.84)),
    "csr+fp8": (P(2.16, 5.17, 2.37, 3.22), P(3.96, 10.07, 2.79, 3.84)),
    "csr+fp16s": (P(2.51, 7.02, 2.46, 3.35), P(4.29, 13.54, 3.33, 4.52)),
    "csr+fp10s": (P(2.51, 6.44, 2.68, 3.59), P(4.29, 12.09, 3.97, 4.84)),
    "csr+fp8s": (P(2.51, 7.26, 2.38, 3.22), P(4.30, 13.43, 3.10, 3.85)),
    "csr+fp16t": (P(2.51, 7.77, 2.46, 3.35), P(4.30, 14.41, 3.07, 4.52)),
    "csr+fp10t": (P(2.51, 6.38, 2.67, 3.59), P(4.30, 11.93, 3.62, 4.84)),
    "csr+fp8t": (P(2.51, 6.91, 2.37, 3.22), P(4.30, 12.67, 2.80, 3.85)),
}

# Change of the passes for one unit of density, from the same benchmark at densities 0.1 and 0.5. csr's compaction
# walks all slots, its time does not know the density. The compositions run the same kernels and were measured at 0.5
# alone: they get their family's slopes.
_SLOPES: dict[str, tuple[Passes, Passes]] = {
    "zvc": (P(0.99, 1.12, 1.32, 1.21), P(0.93, 0.14, 1.40, 1.00)),
    "csr": (P(1.24, 0.04, 2.30, 2.90), P(0.96, 0.00, 2.51, 4.28)),
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
