"""Which calls may run by PyTorch's own nodes, which hold a decoded tensor beside both gradients, without a higher peak.

Gistkit's nodes hold less: weight gradient first, a mask. A decoded tensor beside both gradients is no more than the
device held when the forward ended, where at least as much was kept for later calls, whose nodes are gone by then.
PyTorch's nodes cost the host less (ResNet-50, H200: 51 us a convolution), so they run where there is room."""

from __future__ import annotations

from itertools import accumulate

from gistkit.formats import value_bits
from gistkit.ir import STAY, Form, Plan, SavedGraph, SavedStorage, numel

JOINT_BYTES, JOINT_SHARE = 32 * 2**20, 0.02
"""Tensors up to so many bytes, and that share of all that a plan keeps, are decoded beside both gradients anyway."""


def roomy_calls(graph: SavedGraph, plan: Plan) -> frozenset[int]:
    """The covered convolutions and ReLUs behind which enough is kept: what later calls keep beyond input and both
    gradients is no less than all gradients of parameters."""
    later = _kept_later(graph, plan)
    weight_bytes = sum(s.nbytes for s in graph.storages if s.kind == "parameter")
    found = set()
    for call in graph.calls:
        if call.op in ("conv2d", "relu") and call.covered >= 0 and call.operands and call.results:
            x, y = (graph.storages[graph.values[v].storage].nbytes for v in (call.operands[0], call.results[0]))
            if later[call.index] - 2 * x - y >= weight_bytes:
                found.add(call.covered)
    return frozenset(found)


def _kept_later(graph: SavedGraph, plan: Plan) -> list[int]:
    """By call: bytes on the device, of a size known beforehand, that only later calls save."""
    decided = {d.storage: d for d in plan.decisions}
    fresh = [0] * (len(graph.calls) + 1)
    for storage in graph.kept():
        decision = decided.get(storage.id)
        if decision is not None and decision.place == "device" and storage.kind == "activation":
            fresh[min(call.index for call, _ in graph.savers(storage.id))] += _least_bytes(decision.form, storage)
    return list(accumulate(fresh[:0:-1]))[::-1]


def _least_bytes(form: Form, storage: SavedStorage) -> int:
    if form.returns == STAY:
        return storage.nbytes
    if form.sparse or not form.rounds_to:
        return 0
    return numel(storage) * value_bits(form.rounds_to) // 8
