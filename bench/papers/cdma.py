"""cDMA's figures (Rhu et al., HPCA 2018; arXiv 1705.01626): ``python -m bench.papers.cdma``.

vDNN_all's schedule with performance-optimal convolutions on the Titan X preset, its transfers compressed by the paper's
engine. The text is not among the project's papers; its figures are those of the checklist (C9, C10). It measures
densities while training; here every map that may hold zeros has the one that the average ratio of 2.6 implies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bench.papers.algorithms import paper_algorithms
from bench.papers.common import IMPLIED, Row, Sheet, mean, run
from bench.papers.library_view import library_view
from bench.papers.networks import TITLES, Captures
from gistkit.formats import item_bytes
from gistkit.ir.saved_graph import SavedGraph
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import CostTable, cost_table
from gistkit.planning.policies.vdnn import CODEC, cdma, vdnn
from gistkit.planning.simulate.simulator import simulate

SIX = {"alexnet": 256, "overfeat": 256, "nin": 128, "vgg16": 128, "squeezenet": 512, "googlenet": 256}
"""The paper's six networks. Its text is not at hand: the batches are assumed."""
DENSITY = 0.353
SOURCE = f"{DENSITY}: (32 / 2.6 - 1) / 32, from the paper's average ratio"
AVERAGE = "six networks"


def zvc_ratio(density: float, dtype: str = "float32") -> float:
    """Dense bytes over compressed bytes at a density: at most the bits of an element."""
    bits = 8 * item_bytes(dtype)
    return bits / (1 + bits * density)


class EngineCosts(CostTable):
    """A cost table whose zero-value compression takes no time and has the paper's ratio."""

    def payload_bytes(self, codec: str, nbytes: int, dtype: str, density: float | None = None) -> int:
        if codec != CODEC:
            return super().payload_bytes(codec, nbytes, dtype, density)
        return math.ceil(nbytes / zvc_ratio(1.0 if density is None else density, dtype))

    def encode_s(self, codec: str, nbytes: int, dtype: str, density: float | None = None) -> float:
        return 0.0 if codec == CODEC else super().encode_s(codec, nbytes, dtype, density)

    def decode_s(self, codec: str, nbytes: int, dtype: str, density: float | None = None) -> float:
        return 0.0 if codec == CODEC else super().decode_s(codec, nbytes, dtype, density)

    def relu_backward_s(self, codec: str, nbytes: int, dtype: str, density: float | None = None) -> float:
        return 0.0 if codec == CODEC else super().relu_backward_s(codec, nbytes, dtype, density)


def with_engine(costs: CostTable) -> EngineCosts:
    """The same device with cDMA's compressing engine."""
    return EngineCosts(costs.hardware, costs.algorithms, costs.densities)


@dataclass(frozen=True)
class Compared:
    """Seconds of a step without offloads, under vDNN, under cDMA's engine and under cDMA by kernels of the device;
    bytes to the host under the first two of the latter; the ratio of what was compressed."""

    plain_s: float
    vdnn_s: float
    engine_s: float
    kernels_s: float
    ratio: float

    @property
    def vdnn_loss(self) -> float:
        """Performance that vDNN loses."""
        return 1 - self.plain_s / self.vdnn_s

    @property
    def gain(self) -> float:
        """Performance that cDMA gains over vDNN."""
        return self.vdnn_s / self.engine_s - 1


def compare(graph: SavedGraph, card: str, density: float) -> Compared:
    """One network's step in the library's view under all four."""
    view = library_view(graph)
    costs = cost_table(view, hardware(card), density=density, ways=paper_algorithms)
    plans = {
        "plain": vdnn(view, costs, offload="none", algorithms="p"),
        "vdnn": vdnn(view, costs, algorithms="p"),
        "kernels": cdma(view, costs),
    }
    seconds = {name: simulate(view, plan, costs).step_s for name, plan in plans.items()}
    fast = with_engine(costs)
    engine = cdma(view, fast)
    blocks = {b.storage: b for b in view.blocks if b.storage >= 0}
    sent = [blocks[d.storage] for d in engine.decisions if d.codec == CODEC]
    packed = sum(fast.payload_bytes(CODEC, b.nbytes, b.dtype, density) for b in sent)
    return Compared(
        plain_s=seconds["plain"],
        vdnn_s=seconds["vdnn"],
        engine_s=simulate(view, engine, fast).step_s,
        kernels_s=seconds["kernels"],
        ratio=sum(b.nbytes for b in sent) / packed,
    )


def rows(sheet: Sheet) -> Iterator[Row]:
    """All rows."""
    captures = Captures()
    found = {n: compare(captures.zoo(n, batch), sheet.hardware, DENSITY) for n, batch in SIX.items()}
    check = "implied by the density; a check that the payloads are the format's"
    ratio = mean(c.ratio for c in found.values())
    yield sheet.row(
        "Abstract", AVERAGE, 0, "compression, average", 2.6, ratio, "x", relation=IMPLIED, density=SOURCE, note=check
    )
    sparse = (32 / 13.8 - 1) / 32
    yield sheet.row(
        *("Abstract", "any", 0, "compression, most", 13.8, zvc_ratio(sparse), "x"),
        relation=IMPLIED,
        density=f"{sparse:.3f}: what 13.8x implies",
        note=check,
    )
    lost = {n: 100 * c.vdnn_loss for n, c in found.items()}
    gained = {n: 100 * c.gain for n, c in found.items()}
    told = ", ".join(f"{TITLES[n]} {lost[n]:.0f} and {gained[n]:.0f} %" for n in SIX)
    note = f"vDNN's loss and cDMA's gain by network: {told}"
    yield sheet.row("Abstract", AVERAGE, 0, "vDNN: performance loss, average", 31, mean(lost.values()), "%", note=note)
    yield sheet.row("Abstract", AVERAGE, 0, "vDNN: performance loss, worst", 52, max(lost.values()), "%", note=note)
    gain = mean(gained.values())
    note += ". One density for all maps; likely the paper's sparser ones are those whose transfers stall"
    kernels = 100 * mean(c.vdnn_s / c.kernels_s - 1 for c in found.values())
    note += f". By kernels of the device itself {kernels:.0f} % on average"
    yield sheet.row("Abstract", AVERAGE, 0, "cDMA over vDNN, average", 32, gain, "%", density=SOURCE, note=note)
    yield sheet.row(
        "Abstract", AVERAGE, 0, "cDMA over vDNN, most", 61, max(gained.values()), "%", density=SOURCE, note=note
    )


if __name__ == "__main__":
    run("cdma", "titanx", rows)
