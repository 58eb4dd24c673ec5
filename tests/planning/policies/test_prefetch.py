"""vDNN's findPrefetchLayer (Fig. 10) on hand-made layers."""

from gistkit.ir.layer_view import ACTV, CONV, POOL
from gistkit.planning.policies.vdnn.prefetch import LayerFlags, find_prefetch_layer, prefetches


def layers(text):
    """``C`` CONV, ``A`` ACTV, ``P`` POOL; followed by ``+``: has offloaded, by ``*``: and was prefetched."""
    made = []
    for mark in text:
        if mark in "+*":
            made[-1] = LayerFlags(made[-1].kind, True, mark == "*")
        else:
            made.append(LayerFlags({"C": CONV, "A": ACTV, "P": POOL}[mark]))
    return made


def test_the_nearest_offloaded_layer_is_found():
    assert find_prefetch_layer(layers("C+AC+AP+A"), 5) == 4
    assert find_prefetch_layer(layers("C+AC+AP+A"), 4) == 2


def test_a_layer_without_an_offload_that_is_no_conv_is_passed():
    assert find_prefetch_layer(layers("C+APA"), 3) == 0


def test_the_window_ends_at_a_conv_that_did_not_offload():
    assert find_prefetch_layer(layers("C+ACA"), 3) == -1


def test_the_window_ends_at_a_conv_that_was_prefetched_already():
    assert find_prefetch_layer(layers("C+AC*A"), 3) == -1


def test_a_pool_that_was_prefetched_does_not_end_the_window():
    assert find_prefetch_layer(layers("C+AP*A"), 3) == 0


def test_a_conv_that_is_a_hit_is_returned_not_passed():
    assert find_prefetch_layer(layers("C+C+A"), 2) == 1


def test_nothing_before_the_first_layer_and_nothing_at_all():
    assert find_prefetch_layer(layers("C+A"), 0) == -1
    assert find_prefetch_layer(layers("AAPA"), 3) == -1


def test_the_current_layer_itself_is_not_searched():
    assert find_prefetch_layer(layers("AC+"), 1) == -1


def test_each_layer_is_fetched_once_one_layer_ahead():
    """Backward over C A C A P: the pool's own X is on demand, the second CONV's comes with the pool. Then the ACTV
    finds that CONV prefetched and stops, so the first CONV's X waits for the second CONV."""
    assert prefetches(layers("C+AC+AP+")) == {2: 4, 0: 2}


def test_an_offload_that_no_window_reaches_is_on_demand():
    assert prefetches(layers("P+CA")) == {0: 1}
    assert prefetches(layers("P+ACCA")) == {0: 2}
    assert prefetches(layers("C+")) == {}


def test_pools_between_convs_are_fetched_in_reverse_order():
    assert prefetches(layers("C+P+P+A")) == {2: 3, 1: 2, 0: 1}
