"""From a recorder's notes and the autograd graph to a SavedGraph: names of nodes and fields, hidden functions, escapes.
A custom ``autograd.Function`` does not pass through the function mode: its backward node, whose sequence number belongs
to no call, becomes a call of its own, which reads the results that its edges lead to."""

from __future__ import annotations

import gc
import re
import weakref
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from gistkit.capture.ledger import NO_PRODUCER, Ledger, Notes, OpenCall, Packed, dtype_name, living, tensors_in
from gistkit.capture.nodes import UNREAD, is_accumulator, reachable, saved_fields
from gistkit.ir import Call, Passing, Save, SavedGraph, SavedStorage, by_key
from gistkit.kernels import flat, is_dense

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""
_DENSITY_CHUNK = 1 << 24
UNKNOWN = "?"
SAVED_BY_HAND = "save"
"""The op of what Python code saved without a node of its own, as a checkpoint saves its inputs."""


def assemble(notes: Notes, out: Any) -> SavedGraph:
    """The SavedGraph of a recorded forward that returned ``out``; see ``Recorder.finish``."""
    ledger = notes.ledger
    found = reachable(_roots(ledger, out), notes.first_node)
    nodes = {node._sequence_nr(): node for node in found if not is_accumulator(node)}
    packs = notes.packs()
    names = _names_of_packs(notes, nodes, packs)
    ordered = sorted([*notes.calls, *_hidden_calls(notes, nodes)], key=lambda c: (c.lo, isinstance(c.number, tuple)))
    index = {call.number: i for i, call in enumerate(ordered)}
    notes.index.update(index)
    calls = tuple(_freeze(i, call, names, notes) for i, call in enumerate(ordered))
    if notes.source == "real":
        _measure(ledger, packs)
    storages = tuple(
        SavedStorage(s.id, s.nbytes, dtype_name(s.dtype), s.shape, s.kind, made, s.escapes, s.density)
        for s, made in ((s, index.get(s.producer, NO_PRODUCER)) for s in ledger.storages)
    )
    values = tuple(replace(v, producer=index.get(v.producer, NO_PRODUCER)) for v in ledger.values)
    return SavedGraph(calls, storages, notes.source, values)


def _roots(ledger: Ledger, out: Any) -> list[torch.Tensor]:
    """Tensors that lead into the graph: the outputs and whatever else is still held. Marks both as escaping."""
    outputs = list(tensors_in(out))
    ours = {id(t) for t in outputs}
    held = [t for t in ledger.survivors() if id(t) not in ours]
    if held:
        held.clear()
        gc.collect()
        held = [t for t in ledger.survivors() if id(t) not in ours]
    for t in (*outputs, *held):
        entry = ledger.storage_of(t, "activation")
        if entry is not None and entry.kind == "activation":
            entry.escapes = True
    return [*outputs, *held]


def _names_of_packs(notes: Notes, nodes: dict[int, Any], packs: list[Packed]) -> dict[int, tuple[str, str]]:
    """(node name, field) by the id of each pack; :data:`UNKNOWN` for what autograd does not tell. Mostly the newest
    node of its time holds it. A copy that an in-place op saves has a node of its own: then every node of the call is
    asked, and the pack's node put right."""
    names = {id(packed): (UNKNOWN, UNKNOWN) for packed in packs}

    def ask(sequences: Iterable[int]) -> None:
        for sequence in sorted(nodes.keys() & sequences):
            for field, packed in saved_fields(nodes[sequence], Packed):
                if id(packed) in names:
                    names[id(packed)] = (nodes[sequence].name(), field)
                    packed.node = sequence

    ask({p.node for p in packs})
    for call in notes.calls:
        if any(names[id(p)][0] == UNKNOWN for p in living(call.packs)):
            ask(range(call.lo, call.hi))
    return names


def _hidden_calls(notes: Notes, nodes: dict[int, Any]) -> list[OpenCall]:
    """One call for each backward node that no recorded call made."""
    starts = [c.lo for c in notes.calls]

    def is_hidden(sequence: int) -> bool:
        at = bisect_right(starts, sequence) - 1
        return at < 0 or sequence >= notes.calls[at].hi

    packs = by_key((packed.node, packed) for packed in living(notes.loose))
    results: dict[Any, list[int]] = by_key((value.producer, value.id) for value in notes.ledger.values)
    writes = by_key((entry.producer, entry.id) for entry in notes.ledger.storages)
    hidden = []
    for sequence in sorted({s for s in nodes if is_hidden(s)} | packs.keys()):
        if is_hidden(sequence):
            node, number = nodes.get(sequence), ("node", sequence)
            op = "unknown" if node is None else re.sub(r"Backward\d*$", "", node.name())
            call = OpenCall(number, op, "", sequence, hi=sequence + 1)
            call.results, call.writes = results[number], dict.fromkeys(writes[number])
            for edge, slot in () if node is None else node.next_functions:
                if edge is None or is_accumulator(edge):
                    continue
                value = notes.by_node.get((edge._sequence_nr(), slot))
                if value is not None:
                    call.operands.append(value)
                    call.reads[notes.ledger.values[value].storage] = None
        else:
            call = OpenCall(("saved", sequence), SAVED_BY_HAND, "", sequence)
        for packed in packs[sequence]:
            call.packs.append(weakref.ref(packed))
            if packed.storage is not None:
                call.reads[packed.storage] = None
        hidden.append(call)
    return hidden


def _freeze(index: int, call: OpenCall, names: dict[int, tuple[str, str]], notes: Notes) -> Call:
    hidden = isinstance(call.number, tuple)
    packs = [p for p in living(call.packs) if p.storage is not None]
    # the runtime does not see which hidden function saves, and keeps all of it
    saves = []
    for packed in packs:
        assert packed.storage is not None and packed.like is not None
        shape, _, dtype, _ = packed.like
        node, field = names[id(packed)]
        read = hidden or (node, field) not in UNREAD
        saves.append(Save(packed.storage, node, field, shape, dtype_name(dtype), read, packed.value))
    notes.holds.extend((index, p.node, save) for p, save in zip(packs, saves, strict=True))
    reads, writes, operands, results = map(tuple, (call.reads, call.writes, call.operands, call.results))
    passing, known = [], 0  # what the call saved for backward nodes which were freed before the forward ended
    for ref, (storage, dtype, shape) in zip(call.packs, call.packed, strict=False):
        alive = ref() is not None
        if storage is not None:
            passing += [] if alive else [Passing(known, storage, dtype, shape)]
            known += alive
    about = index, call.op, call.covered, call.module, reads, writes, tuple(saves), call.inplace, call.options
    return Call(*about, operands, results, hidden, tuple(passing))


@torch.no_grad()
def _measure(ledger: Ledger, packs: list[Packed]) -> None:
    """Densities of saved float activations: the share of elements whose bits are not all zero."""
    counts = {}
    for packed in packs:
        entry = None if packed.storage is None else ledger.storages[packed.storage]
        if entry is None or entry.kind != "activation" or entry.id in counts or entry.nbytes == 0:
            continue
        t = packed.tensor
        size = t.element_size()
        if t.is_floating_point() and size in _BITS and is_dense(t) and t.numel() * size == entry.nbytes:
            bits = flat(t).view(_BITS[size]).split(_DENSITY_CHUNK)
            counts[entry.id] = (torch.stack([part.count_nonzero() for part in bits]).sum(), t.numel())
    for i, (count, elements) in counts.items():
        ledger.storages[i].density = int(count) / elements
