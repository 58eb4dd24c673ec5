"""How covered calls run: ReLUs in place, ReLUs whose mask a pool's map carries, and those pools."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from gistkit import formats
from gistkit.ir import KERNEL_DTYPES, Call, CallChoice, Decision, Reading, Value


def map_bits(pool: Call, reading: Reading, carries_mask: bool) -> int | None:
    """Bits of one code of a covered max-pool's map: 4, 8, or None where PyTorch's own pool runs.

    A map that also carries a mask needs one code for "no gradient" beside the window's positions.
    """
    if pool.covered < 0 or pool.options is None or len(reading.operand(pool).shape) != 4:
        return None
    codes = prod(pool.options["kernel_size"]) + carries_mask
    if reading.operand(pool).dtype not in KERNEL_DTYPES or codes > formats.ARGMAX8_POSITIONS:
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


def may_overwrite(relu: Call, reading: Reading) -> bool:
    """Whether a ReLU may write its output over its input: nobody else ever reads it, nothing keeps it (Gist III-C).

    Not where a real step was recorded: what scripted code reads without gradients goes unseen there. Nor without
    gradients, where nothing is recorded and PyTorch's own runs.
    """
    if reading.graph.source != "fake" or not (relu.saves or relu.passing):
        return False
    value = reading.operand(relu)
    storage = reading.graph.storages[value.storage]
    if relu.inplace or storage.escapes or storage.kind != "activation" or not value.whole:
        return False
    if value.view and not _made_without(value, reading):
        return False
    only_reader = [c.index for c in reading.graph.readers(value.storage)] == [relu.index]
    return only_reader and not reading.graph.savers(value.storage)


def _made_without(value: Value, reading: Reading) -> bool:
    """Whether gistkit's own op gives as a tensor of its own what PyTorch's gives as a view: rows of a linear."""
    return value.producer >= 0 and reading.graph.calls[value.producer].op == "linear" and len(value.shape) > 2


def call_choices(reading: Reading, decisions: Mapping[int, Decision]) -> tuple[CallChoice, ...]:
    """The choices that differ from a call's plain way, in call order."""
    choices: dict[int, dict] = {}
    for call in reading.graph.calls:
        if call.op != "relu" or call.covered < 0 or not (call.operands and call.results):
            continue
        if may_overwrite(call, reading):
            choices.setdefault(call.covered, {"op": "relu"})["inplace"] = True
        decision = decisions.get(reading.graph.values[call.results[0]].storage)
        pool = mask_carrier(call, reading)
        if decision is not None and decision.form.gone and pool is not None:
            choices.setdefault(call.covered, {"op": "relu"})["mask_in_pool"] = True
            choices[pool.covered] = {"op": "max_pool2d", "mask_in_pool": True}
    return tuple(CallChoice(covered, **how) for covered, how in sorted(choices.items()))
