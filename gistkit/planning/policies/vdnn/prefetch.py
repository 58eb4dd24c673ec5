"""vDNN's choice of what to prefetch when (Rhu et al., MICRO 2016, section III-B, Fig. 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gistkit.ir import CONV

NOTHING = -1


@dataclass(frozen=True)
class LayerFlags:
    """What the search looks at: the layer's kind, whether it offloaded its X, whether that was prefetched already."""

    kind: str
    offloaded: bool = False
    prefetched: bool = False


def find_prefetch_layer(layers: Sequence[LayerFlags], current: int) -> int:
    """The layer whose X is fetched while layer ``current`` runs backward, -1 where there is none (Fig. 10).

    The nearest preceding layer that offloaded and was not prefetched yet. The search ends at the next CONV that is no
    hit, so that nothing comes back long before it is used. (The paper prints the test for CONV behind the loop's brace;
    it belongs inside.) The paper's routine also flags its hit as prefetched; here that is :func:`prefetches`.
    """
    for layer in range(current - 1, -1, -1):
        if layers[layer].offloaded and not layers[layer].prefetched:
            return layer
        if layers[layer].kind == CONV:
            return NOTHING
    return NOTHING


def prefetches(layers: Sequence[LayerFlags]) -> dict[int, int]:
    """For each offloaded layer the layer during whose backward its X comes back, all layers run in reverse.

    A layer that nobody prefetched before its own backward begins is missing: its X is copied on demand.
    """
    flags, fetched_during = list(layers), {}
    for current in range(len(flags) - 1, -1, -1):
        hit = find_prefetch_layer(flags, current)
        if hit != NOTHING:
            flags[hit] = replace(flags[hit], prefetched=True)
            fetched_during[hit] = current
    return fetched_during
