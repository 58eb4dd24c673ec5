"""Packed arrays of a chosen capacity, and the run of memory beside them for what does not fit.

A sparse encoding whose size the host does not know yet can be packed into arrays that are as long as the last step lets
expect. Elements go in groups of GROUP: a group whose last item ends within the capacity lies in the arrays, any other
one in the *spill*, memory that the device can address (pinned host memory, say), and as the running sums of the counts
never fall, all groups after it do as well. There an item keeps its place of the one long array, counted from an origin
a group before the capacity's end, as the first group there begins no earlier:

    spill = values' run | up to a multiple of ALIGNMENT bytes | csr: columns' run;  run[p - origin] is item p

The origin is a multiple of 8, as the capacity is, so that octets are aligned on both sides. An aligned octet of which
one item is the spill's lies in the run altogether.
"""

from __future__ import annotations

from gistkit.formats import CSR_COLUMNS, ceil_div

GROUP = 8192
"""Elements that lie in the arrays, or in the spill, together: whole programs of every kernel that packs or reads."""
ALIGNMENT = 512
"""Bytes: where the runs of a spill begin, as torch's own allocations do."""


def group_slots(stride: int) -> int:
    """Slots (zvc) or rows (csr) of ``stride`` elements in a group."""
    return GROUP // stride


def spill_origin(capacity: int) -> int:
    """Place in the one long array that a run begins with; negative where less than a group fits into the arrays."""
    return capacity - GROUP


def columns_start(whole: int, capacity: int, item_bytes: int) -> int:
    """Bytes of the values' run, up to ALIGNMENT: where the columns' begins. ``whole``: elements of whole slots."""
    items = 0 if capacity >= whole else whole - spill_origin(capacity)
    return ceil_div(items * item_bytes, ALIGNMENT) * ALIGNMENT


def spill_bytes(whole: int, capacity: int, item_bytes: int, columns: bool) -> int:
    """Bytes of the spill of slots of ``whole`` elements in all, whatever is stored; 0 where all of them fit."""
    return columns_start(whole, capacity, item_bytes) + (columns_start(whole, capacity, 1) if columns else 0)


def packed_bytes(total: int, item_bytes: int, columns: bool) -> int:
    """Bytes of ``total`` packed items in a lane: the values' run and csr's columns' run, each up to ALIGNMENT."""
    blocks = -(-total * item_bytes // ALIGNMENT) + (-(-total // ALIGNMENT) if columns else 0)
    return blocks * ALIGNMENT


def known_bytes(slots: int, stride: int) -> int:
    """Bytes in a lane of what has a known size, zvc's words and the counts of the slots, up to ALIGNMENT."""
    words_bytes = 0 if stride == CSR_COLUMNS else stride // 8
    return ceil_div(slots * (words_bytes + 2), ALIGNMENT) * ALIGNMENT
