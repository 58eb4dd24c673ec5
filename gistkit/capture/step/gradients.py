"""Which tensors made in backward are gradients of weights and biases: made first where the backward of a convolution or
linear is taken in two halves, and whole in every sub-batch. A parameter's ``.grad`` does not tell where the parameter
gets a copy in a layout of its own, or where the weight is computed in the step: by autocast, say."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from gistkit.capture.ledger import Ledger, Notes
from gistkit.capture.step.trace import ACCUMULATE, Seen, Tracer
from gistkit.ir import Call, SavedGraph

_WEIGHT_FIELDS = ("weight", "mat2")
"""Names under which their nodes save the weight."""


def weight_gradients(
    graph: SavedGraph, notes: Notes, tracer: Tracer, calls: Sequence[int], gradients: Collection[int]
) -> frozenset[int]:
    """The ids of what the tracer saw that are gradients of weights and biases: ``gradients``, the parameters' own, what
    those are copies of, and what the halves of split calls make. ``calls``: by span, its call or -1."""
    split, ledger = split_calls(notes), notes.ledger
    own = {s.id for s in tracer.seen if s.ref.cdata in gradients}
    found = own | set(_copied(tracer, own))
    for span, call in zip(tracer.spans, calls, strict=True):
        if span.key[0] == "backward" and call in split:
            storages = {i: _storage(tracer.seen[i], ledger) for of in span.sources.values() for i in of}
            weight = graph.values[graph.calls[call].operands[1]].storage
            found.update(_of_halves(graph.calls[call], weight, span.sources, storages))
    return frozenset(found)


def split_calls(notes: Notes) -> frozenset[int]:
    """The calls of the assembled graph whose backward is taken in two halves."""
    return frozenset(notes.index[c.number] for c in notes.calls if c.covered >= 0 and c.split)


def reading_halves(parts: Sequence[str], field: str, reads_input: bool) -> tuple[int, ...]:
    """Which of a backward's tasks, by place, read what a node saved for it under that name; ``parts`` are those of its
    first task and of the one behind. The input gradient reads the weight, and the input where ``reads_input`` says so:
    else nothing is kept of it where the weight is frozen (nn.conv)."""
    if list(parts) == ["weight", "input"]:
        return (0, 1) if field in _WEIGHT_FIELDS or reads_input else (0,)
    return () if parts[0] == "input" and field == "input" and not reads_input else (0,)


def _copied(tracer: Tracer, own: set[int]) -> Iterator[int]:
    """Weight gradients in another layout than their parameter, which gets a copy."""
    seen = tracer.seen
    for span in tracer.spans:
        if span.key[2] == ACCUMULATE and own.intersection(span.writes):
            sizes = {seen[i].nbytes for i in span.writes}
            yield from (i for i in span.reads if seen[i].nbytes in sizes and i not in own)


def _of_halves(
    call: Call, weight: int, made_of: Mapping[int, frozenset[int]], storages: Mapping[int, int]
) -> Iterator[int]:
    """What the node that reads the call's weight or its input makes, but for what it makes of the weight, by way of
    what it made before too: that is the input's gradient, to which autograd may have added another branch's."""
    saved = {s.storage for s in call.saves}
    weights = {s.storage for s in call.saves if s.field in _WEIGHT_FIELDS} | {weight}
    if not any(saved & {storages[i] for i in of} for of in made_of.values()):
        return
    of_input: set[int] = set()
    for made, of in made_of.items():  # in the order in which they were made
        if weights & {storages[i] for i in of} or of_input & of:
            of_input.add(made)
        else:
            yield made


def _storage(item: Seen, ledger: Ledger) -> int:
    """The storage that was seen, itself or what stands in for it; -1 for one that forward did not know."""
    entry = ledger.known(item.ref.cdata) if item.stand_in is None else None
    return entry.id if entry is not None else -1 if item.stand_in is None else item.stand_in
