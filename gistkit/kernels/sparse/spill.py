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

import torch

from gistkit.formats import ceil_div

GROUP = 8192
"""Elements that lie in the arrays, or in the spill, together: whole programs of every kernel that packs or reads."""
ALIGNMENT = 512
"""Bytes: where the runs of a spill begin, as torch's own allocations do."""
_START = 32  # bytes of eight of the largest items: the distance of run and array is whole octets


def group_slots(stride: int) -> int:
    """Slots (zvc) or rows (csr) of ``stride`` elements in a group."""
    return GROUP // stride


def spill_origin(capacity: int) -> int:
    """Place in the one long array that a run begins with; negative where less than a group fits into the arrays."""
    return capacity - GROUP


def columns_start(whole: int, capacity: int, item_bytes: int) -> int:
    """Bytes of the values' run, up to ALIGNMENT: where the columns' begins. ``whole``: elements of whole slots."""
    return ceil_div(_run_items(whole, capacity) * item_bytes, ALIGNMENT) * ALIGNMENT


def spill_bytes(whole: int, capacity: int, item_bytes: int, columns: bool) -> int:
    """Bytes of the spill of slots of ``whole`` elements in all, whatever is stored; 0 where all of them fit."""
    return columns_start(whole, capacity, item_bytes) + (columns_start(whole, capacity, 1) if columns else 0)


def packed_bytes(total: int, item_bytes: int, columns: bool) -> int:
    """Bytes of ``total`` packed items in a lane: the values' run and csr's columns' run, each up to ALIGNMENT."""
    blocks = -(-total * item_bytes // ALIGNMENT) + (-(-total // ALIGNMENT) if columns else 0)
    return blocks * ALIGNMENT


def _run_items(whole: int, capacity: int) -> int:
    return 0 if capacity >= whole else whole - spill_origin(capacity)


def check_capacity(op: str, capacity: int, whole: int) -> None:
    """Raise ValueError unless the capacity is a number of items that arrays for ``whole`` elements may have."""
    if capacity % 8 or not 8 <= capacity <= whole:
        raise ValueError(
            f"{op}: capacity must be a multiple of 8 from 8 to {whole}, the elements of whole slots, got {capacity}; "
            "ask the codec's capacity(n, density) for one"
        )


def check_spill(op: str, spill: torch.Tensor, counts: torch.Tensor, stride: int, *arrays: torch.Tensor) -> None:
    """Raise unless spill is memory for what the arrays (values, and csr's columns) of packed slots have no room for."""
    values, whole = arrays[0], counts.numel() * stride
    check_capacity(op, values.numel(), whole)
    if spill.dtype is not torch.uint8 or spill.dim() != 1 or not spill.is_contiguous():
        raise TypeError(
            f"{op}: spill must be flat, contiguous bytes (torch.uint8), got {tuple(spill.shape)} {spill.dtype}; "
            "view it as these"
        )
    needed = spill_bytes(whole, values.numel(), values.element_size(), len(arrays) > 1)
    if spill.numel() < needed:
        raise ValueError(
            f"{op}: spill must have {needed} bytes for {whole} elements of which {values.numel()} have room, got "
            f"{spill.numel()}; ask the codec's spill_bytes for the size"
        )
    if needed and (spill.data_ptr() % _START or values.data_ptr() % _START):
        raise ValueError(
            f"{op}: spill and values must start at multiples of {_START} bytes, got {spill.data_ptr():#x} and "
            f"{values.data_ptr():#x}; cut the spill at multiples of {ALIGNMENT} bytes"
        )


def check_addressable(op: str, spill: torch.Tensor, x: torch.Tensor) -> None:
    """Raise ValueError unless x's device can address spill. Asks the driver: 1 us, for the one who hands it in."""
    if x.is_cuda and spill.numel() and not (spill.is_cuda or spill.is_pinned()):
        raise ValueError(f"{op}: spill must be pinned memory for x on {x.device}, got pageable memory; pin it")


def check_spilled(
    op: str, spill: torch.Tensor | None, counts: torch.Tensor, fmt: str, scaling: str, packed: bool, stride: int,
    *arrays: torch.Tensor,
) -> None:  # fmt: skip
    """:func:`check_spill` of a payload that is read, where there is a spill."""
    if spill is None:
        return
    if not packed or scaling != "none" or fmt == "fp10":
        raise ValueError(
            f"{op}: spill must be None unless values are packed items of their own (no scaling, not fp10), got "
            f"fmt={fmt!r}, scaling={scaling!r}, packed={packed}; pass what was packed with it"
        )
    if counts.numel():
        check_spill(op, spill, counts, stride, *arrays)
