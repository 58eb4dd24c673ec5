"""zvc's values in an array of a chosen capacity, and the run of memory beside it for what does not fit.

An encoding whose size the host does not know yet can be packed into an array that is as long as the last step lets
expect. Elements go in groups of GROUP: a group whose last value ends within the capacity lies in the array, any other
one in the *spill*, memory that the device can address (pinned host memory, say), and as the running sums of the counts
never fall, all groups after it do as well. There a value keeps its place of the one long array, counted from an origin
a group before the capacity's end, as the first group there begins no earlier: run[p - origin] is value p.

The origin is a multiple of 8, as the capacity is, so that octets are aligned on both sides. An aligned octet of which
one value is the spill's lies in the run altogether.
"""

from __future__ import annotations

from gistkit.formats import ZVC_SLOT

GROUP = 8192
"""Elements that lie in the array, or in the spill, together: whole programs of every kernel that packs or reads."""
GROUP_SLOTS = GROUP // ZVC_SLOT
ALIGNMENT = 512
"""Bytes: what the sizes of runs are rounded up to, as torch's own allocations are."""


def spill_origin(capacity: int) -> int:
    """Place in the one long array that a run begins with; negative where less than a group fits into the array."""
    return capacity - GROUP


def spill_bytes(whole: int, capacity: int, item_bytes: int) -> int:
    """Bytes of the spill of slots of ``whole`` elements in all, whatever is stored; 0 where all of them fit."""
    return 0 if capacity >= whole else packed_bytes(whole - spill_origin(capacity), item_bytes)


def packed_bytes(total: int, item_bytes: int) -> int:
    """Bytes of a run of ``total`` items, up to ALIGNMENT."""
    return -(-total * item_bytes // ALIGNMENT) * ALIGNMENT
