"""How covered calls run: ReLUs whose mask a pool's map carries, and those pools."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from gistkit import formats
from gistkit.ir import KERNEL_DTYPES, Call, CallChoice, Decision, Reading


def map_bits(pool: Call, reading: Reading, carries_mask: bool) -> int | None:
    """Bits of one code of a covered max-pool's map: 4, 8, or None where PyTorch's own pool runs.

    A map that also carries a mask needs one code for "no gradient" beside the window's positions.
    """
    if pool.covered < 0 or pool.options is None or len(reading.operand(pool).shape) != 4:
        return None
    codes = prod(pool.options["kernel_size"]) + carries_mask
    dilated = prod(pool.options["dilation"]) != 1
    if dilated or reading.operand(pool).dtype not in KERNEL_DTYPES or codes > formats.ARGMAX8_POSITIONS:
        return None
    return 4 if codes <= formats.ARGMAX4_POSITIONS else 8


def mask_carrier(relu: Call, reading: Reading) -> Call | None:
    """The max-pool whose map can carry a ReLU's mask: the ReLU output's only reader, whatever the reader wants.

    A hook, a view, a second branch: each may ask for the ReLU's own gradient; who asks for the pool's node may hang a
    hook on it, and its gradient need no longer be zero where the map says so. (So may whoever holds an output of the
    model; escaping storages are decided before this is asked.)
    """
    value = reading.graph.values[relu.results[0]]
    readers = reading.readers_after(relu, value.storage)
    if len(readers) != 1:
        return None
    pool = readers[0]
    if pool.op != "max_pool2d" or pool.operands[0] != value.id or not value.whole:
        return None
    pooled = [reading.graph.values[i].storage for i in pool.results]
    if any(c.op == "grad_fn" for storage in pooled for c in reading.readers_after(pool, storage)):
        return None
    return pool if map_bits(pool, reading, carries_mask=True) is not None else None


def call_choices(reading: Reading, decisions: Mapping[int, Decision]) -> tuple[CallChoice, ...]:
    """The choices that differ from a call's plain way, in call order."""
    choices: dict[int, CallChoice] = {}
    for call in reading.graph.calls:
        if call.op != "relu" or call.covered < 0 or not (call.operands and call.results):
            continue
        decision = decisions.get(reading.graph.values[call.results[0]].storage)
        pool = mask_carrier(call, reading)
        if decision is not None and decision.form.gone and pool is not None:
            choices |= {c.covered: CallChoice(c.covered, c.op, mask_in_pool=True) for c in (call, pool)}
    return tuple(choice for _, choice in sorted(choices.items()))
