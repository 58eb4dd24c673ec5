"""vDNN's findPrefetchLayer (Fig. 10) on hand-made layers."""

import pytest

from gistkit.ir.layer_view import ACTV, CONV, POOL
from gistkit.planning.policies.vdnn.offload import LayerFlags, find_prefetch_layer, prefetches


def layers(text):
    """``C`` CONV, ``A`` ACTV, ``P`` POOL; followed by ``+``: has offloaded, by ``*``: and was prefetched."""
    made = []
    for mark in text:
        if mark in "+*":
            made[-1] = LayerFlags(made[-1].kind, True, mark == "*")
        else:
            made.append(LayerFlags({"C": CONV, "A": ACTV, "P": POOL}[mark]))
    return made


@pytest.mark.parametrize(
    ("text", "current", "hit"),
    [
        ("C+AC+AP+A", 5, 4),  # the nearest offloaded layer
        ("C+AC+AP+A", 4, 2),  # not the current one
        ("AC+", 1, -1),
        ("C+C+A", 2, 1),  # a CONV that is a hit is returned, not passed
        ("C+APA", 3, 0),  # a layer without an offload that is no CONV is passed
        ("C+AP*A", 3, 0),  # and so is a POOL that was prefetched already
        ("C+ACA", 3, -1),  # the window ends at a CONV that did not offload
        ("C+AC*A", 3, -1),  # or that was prefetched already
        ("C+A", 0, -1),
        ("AAPA", 3, -1),
    ],
)
def test_the_layer_of_figure_10(text, current, hit):
    assert find_prefetch_layer(layers(text), current) == hit


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
    assert prefetches(layers(text)) == fetched
