"""Gist's Fig. 16: ResNet-1202 with the largest minibatch that fits a 12 GB card, with and without encodings."""

from __future__ import annotations

from collections.abc import Iterator

from bench.papers.common import Row, Sheet, say
from bench.papers.gist_cases import ENCODINGS, Case
from bench.papers.networks import Captures
from gistkit.ir.scale import scaled
from gistkit.planning.cost.devices import hardware

CAPTURED = 1024
LOSSY = "fp16"


def largest_batch(footprint_bytes: int, fixed_bytes: int, memory_bytes: int) -> int:
    """The largest batch whose maps, so large for :data:`CAPTURED` images, fit beside what does not grow."""
    return int((memory_bytes - fixed_bytes) * CAPTURED // footprint_bytes)


def deep_rows(sheet: Sheet, captures: Captures, density: float, source: str) -> Iterator[Row]:
    """The one figure that the text gives: 22 % for ResNet-1202."""
    graph = captures.zoo("resnet1202", CAPTURED, inplace=False)
    case = Case(graph, sheet.hardware, density)
    memory = hardware(sheet.hardware).memory_bytes
    fixed = sum(b.nbytes for b in graph.blocks if b.kind in ("weight", "buffer", "weight_gradient"))
    batches = [largest_batch(found.dynamic, fixed, memory) for found in (case.baseline, case.encoded(ENCODINGS, LOSSY))]
    say(f"ResNet-1202: largest minibatches {batches[0]} and {batches[1]}")
    an_image = []
    for batch, encodings in zip(batches, ((), ENCODINGS), strict=True):
        parts = -(-CAPTURED // batch)
        seconds = Case(scaled(graph, parts), sheet.hardware, density).step_s(encodings, LOSSY if encodings else None)
        an_image.append(seconds / -(-CAPTURED // parts))
    yield sheet.row(
        *("V-G, Fig. 16", "ResNet-1202", 0, "Gist: speed-up by a larger minibatch", 22),
        *(100 * (an_image[0] / an_image[1] - 1), "%"),
        density=source,
        note=f"minibatches of {batches[0]} and {batches[1]} (dynamic allocation, lossless with FP16). The cost model "
        "knows no utilisation: a small kernel takes its roofline or a launch, so a larger minibatch gains little and "
        "encoding costs",
    )
