"""vDNN's findPrefetchLayer (Fig. 10) on hand-made layers."""

import pytest

from gistkit.ir.layer_view import ACTV, CONV, POOL
from gistkit.planning.policies.vdnn import find_prefetch_layer, prefetches


def layers(text):
    """``C`` CONV, ``A`` ACTV, ``P`` POOL: their kinds, and the numbers of those followed by ``+``, which have
    offloaded and were not prefetched."""
    kinds, waiting = [], set()
    for mark in text:
        if mark == "+":
            waiting.add(len(kinds) - 1)
        else:
            kinds.append({"C": CONV, "A": ACTV, "P": POOL}[mark])
    return kinds, waiting


@pytest.mark.parametrize(
    ("text", "current", "hit"),
    [
        ("C+AC+AP+A", 5, 4),  # the nearest offloaded layer
        ("C+AC+AP+A", 4, 2),  # not the current one
        ("AC+", 1, -1),
        ("C+C+A", 2, 1),  # a CONV that is a hit is returned, not passed
        ("C+APA", 3, 0),  # a layer that is no CONV is passed: it did not offload, or was prefetched already
        ("C+ACA", 3, -1),  # the window ends at a CONV that did not offload, or that was prefetched already
        ("C+A", 0, -1),
        ("AAPA", 3, -1),
    ],
)
def test_the_layer_of_figure_10(text, current, hit):
    assert find_prefetch_layer(*layers(text), current) == hit


@pytest.mark.parametrize(
    ("text", "fetched"),
    [
        # The pool's own X is on demand, the second CONV's comes with the pool. Then the ACTV finds that CONV prefetched
        # and stops, so the first CONV's X waits for the second CONV.
        ("C+AC+AP+", {2: 4, 0: 2}),
        *(("P+CA", {0: 1}), ("P+ACCA", {0: 2}), ("C+", {}), ("C+P+P+A", {2: 3, 1: 2, 0: 1})),
    ],
)
def test_each_layer_is_fetched_once_in_reverse_order_or_on_demand(text, fetched):
    assert prefetches(*layers(text)) == fetched
