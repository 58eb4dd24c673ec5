"""Tracer: which storages exist during every operator of one step on fake tensors, forward and backward. Light stand-ins
hold saved tensors (``Recorder(light=True)``), so a storage dies where it would if backward kept nothing of it, and what
backward makes lives as long as it really does. What runs between two changes of the forward call or the backward node
is one *span*, of which :mod:`gistkit.capture.step.tasks` makes tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gistkit.capture.fakes import DEVICE, Fakes
from gistkit.capture.ledger import dtype_name, tensors_in
from gistkit.capture.recorder import Recorder
from gistkit.capture.step.conv_backward import CONV_BACKWARD, reads_input, unasked_bytes
from gistkit.capture.step.cuda_scratch import scratch_bytes

ACCUMULATE = "torch::autograd::AccumulateGrad"
GRADIENT_SUM = "add"
_aten = torch.ops.aten
_SUMS = (_aten.add.Tensor, _aten.add_.Tensor)
_REDUCED = {
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.binary_cross_entropy.default,
    _aten.soft_margin_loss.default,
}
"""Losses whose scalar keeps the storage in which the loss of every element was laid; a fake one does not show that."""
_DRAWING = frozenset(("dropout_p", "dropout", "train", "training"))
"""Arguments without which nothing is drawn: attention, recurrent layers, ``native_dropout``, RReLU."""
Key = tuple[str, int | None, str]


@dataclass
class Seen:
    """One storage: made in span ``first`` (-1: from before), there until the end of span ``last``. One that stands for
    a saved tensor, of storage ``stand_in``, is there from the first span that reads it, that of ``unpacked``, to
    ``last``: as long as what a plan would decode. ``cast``: made by autocast of a weight, for its cache to hold while
    the context is open."""

    id: int
    ref: StorageWeakRef
    nbytes: int
    dtype: str
    first: int
    last: int = -1
    stand_in: int | None = None
    unpacked: int = -1
    cast: bool = False


@dataclass
class Span:
    """Operators that ran one after the other for one forward call or one backward node. ``key``: (phase, provisional
    call number or node sequence number, node name). ``sources``: what it made, by what that was made of.
    ``unasked_bytes``: of a weight gradient that PyTorch makes beside the bias's although nobody asked for it.
    ``reads_input``: whether a convolution's input must be there for its input gradient, taken by itself, too.
    ``draws``: whether it draws random numbers."""

    key: Key
    ops: list[str] = field(default_factory=list)
    reads: dict[int, None] = field(default_factory=dict)
    writes: dict[int, None] = field(default_factory=dict)
    flops: int = 0
    moved_bytes: int = 0
    peak_bytes: int = 0
    dtype: str = ""
    conv: tuple | None = None
    sources: dict[int, frozenset[int]] = field(default_factory=dict)
    unasked_bytes: int = 0
    reads_input: bool = False
    draws: bool = False


class Tracer(TorchDispatchMode):
    """Watches one step; entered inside FakeTensorMode (``fakes``), paused while ``active`` is False."""

    def __init__(self, recorder: Recorder, fakes: Fakes | None = None) -> None:
        from torch.utils.flop_counter import flop_registry  # here, as it imports Triton

        super().__init__()
        self._recorder, self._fakes, self._on_cpu = recorder, fakes, fakes is None or fakes.on_cpu
        self._flops = flop_registry
        self.phase = "forward"
        self.active = True
        self.spans: list[Span] = []
        self.seen: list[Seen] = []
        self._known: dict[int, Seen] = {}
        self._fresh: dict[int, Seen] = {}
        """Made since it was last asked what lives; then among ``_live``, if it still does."""
        self._live: dict[int, Seen] = {}
        self._live_bytes = self._asked = 0
        self._stood: dict[int, Seen] = {}
        self.dropped: dict[int, int] = {}
        """By storage, the span in which a node that held it died before backward; past the last where it stays."""
        self._leaf: torch.Tensor | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # 4 us for each operator; nothing is compiled while a mode like this one is active

    def outside(self, tensors: Iterable[torch.Tensor]) -> None:
        for t in tensors:
            self._note(t)

    def _settle(self) -> None:
        """The last accumulated parameter gradient outlives the step, so its life is no longer tracked."""
        leaf, self._leaf = self._leaf, None
        if leaf is not None and leaf.grad is not None:
            cdata = leaf.grad.untyped_storage()._cdata
            item = self._fresh.pop(cdata, None) or self._gone(cdata)
            if item is not None:
                item.last = len(self.spans) - 1

    def _gone(self, cdata: int) -> Seen | None:
        """Take one storage out of the living ones; it lived until they were last looked at."""
        item = self._live.pop(cdata, None)
        if item is not None:
            item.last = self._asked
            self._live_bytes -= item.nbytes
        return item

    def stand_in(self, make: Callable[[], torch.Tensor], storage: int | None) -> torch.Tensor:
        """A tensor that stands for a saved one of the given SavedGraph storage; not counted as memory."""
        active, self.active = self.active, False
        try:
            t = make()
        finally:
            self.active = active
        if t.untyped_storage()._cdata not in self._known:
            item = self._note(t)
            item.stand_in = -1 if storage is None else storage
            self._stood[item.ref.cdata] = item
        return t

    def read(self, t: torch.Tensor) -> None:
        """What is at work reads a tensor, be it to save it for backward."""
        if self.active:
            self._reads(self._span(self._key()), [self._note(t).id])

    def _reads(self, span: Span, ids: Iterable[int]) -> None:
        span.reads.update(dict.fromkeys(ids))
        for item in (self.seen[i] for i in ids):
            if item.stand_in is not None and item.unpacked < 0:
                item.unpacked = len(self.spans) - 1

    def drop(self, storage: int) -> None:
        """A backward node that held the storage has been freed: the storage counts until now, and is not read later."""
        if self.phase != "backward":  # by the forward itself, or by the loss
            self.dropped[storage] = len(self.spans) - 1

    def autocast_ends(self) -> None:
        """The autocast context around the forward is left here, as in a training loop, and its cache of casts with it;
        in the capture that context is the caller's, and stays open."""
        self._poll()
        for cdata in [c for c, item in self._live.items() if item.cast]:
            self._gone(cdata)

    def finish(self, held: Iterable[int] = ()) -> None:
        """Close the last span. ``held``: storages that nodes still hold, as they lead to results that the loss does not
        read: until the step is over."""
        self._poll()
        self.dropped |= dict.fromkeys(held, len(self.spans))
        for item in self._live.values():
            item.last = self._asked

    def _key(self) -> Key:
        if self.phase != "backward":
            return self.phase, self._recorder.current if self.phase == "forward" else None, ""
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        if node is None:
            return "backward", None, ""
        name = node.name()
        if name == ACCUMULATE:
            self._leaf = node.variable  # type: ignore[attr-defined]
        return "backward", node._sequence_nr(), name

    def _span(self, key: Key) -> Span:
        if not self.spans or self.spans[-1].key != key:
            self._settle()
            self._poll()  # what died between the spans was there during the last one
            self.spans.append(Span(key))
        return self.spans[-1]

    def _is_sum(self, func: Any, inputs: list[torch.Tensor], key: Key) -> bool:
        """Whether autograd adds a node's result to what another branch sent, after the node and under its name: one
        term was made by the node, the other neither made nor read by it."""
        if func not in _SUMS or key[0] != "backward" or not self.spans or self.spans[-1].key != key:
            return False
        span, now = self.spans[-1], len(self.spans) - 1
        terms = [self._known.get(t.untyped_storage()._cdata) for t in inputs]
        if len(terms) != 2 or None in terms:
            return False
        others = [t for t in terms if t is not None and t.first != now]
        return len(others) == 1 and others[0].id not in span.reads

    def _note(self, t: torch.Tensor, first: int = -1) -> Seen:
        storage = t.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None:
            known = Seen(len(self.seen), StorageWeakRef(storage), storage.nbytes(), dtype_name(t.dtype), first)
            self.seen.append(known)
            self._known[known.ref.cdata] = known
            if first >= 0:
                self._fresh[known.ref.cdata] = known
        return known

    def _note_cast(self, weight: torch.Tensor, lowered: torch.Tensor) -> None:
        """Autocast caches the casts of fp32 leaves that require gradients."""
        of = self._note(weight)
        if of.first < 0 and of.stand_in is None and weight.requires_grad and weight.dtype == torch.float32:
            self._note(lowered).cast = lowered.element_size() < weight.element_size()

    def _poll(self) -> int:
        """Bytes of what lives now; what has died lived until the end of the present span."""
        expired, now = torch.UntypedStorage._expired, len(self.spans) - 1  # asked 10,000,000 times for 1,000 layers
        for cdata in [c for c in self._live if expired(c)]:
            self._gone(cdata)
        for cdata, item in self._fresh.items():
            if not expired(cdata):
                self._live[cdata] = item
                self._live_bytes += item.nbytes
        self._fresh.clear()
        self._asked = now
        for cdata, item in list(self._stood.items()):
            if item.ref.expired():
                del self._stood[cdata]
            elif item.unpacked >= 0:
                item.last = now
        return self._live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunction():  # TorchScript's calls leave function modes on: they would see this
            return self._operator(func, args, kwargs or {})

    def _operator(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func is DEVICE:
            self.read(args[0])
        if not self.active or func is DEVICE:
            return self._result(func, args, kwargs)
        inputs = list(_tensors((args, kwargs)))
        key = self._key()
        span = self._span((key[0], None, GRADIENT_SUM) if self._is_sum(func, inputs, key) else key)
        read = {self._note(t).id: t for t in inputs}
        out = self.run(span, func, args, kwargs)
        outputs = list(_tensors(out))
        made = {self._note(t, first=len(self.spans) - 1).id: t for t in outputs}
        if func is _aten._to_copy.default and self.phase != "backward" and torch.is_autocast_cache_enabled():
            self._note_cast(inputs[0], out)
        if func in _REDUCED and isinstance(out, torch.Tensor) and out.dim() == 0:
            elements = torch.broadcast_shapes(*(t.shape for t in inputs)).numel()
            self._note(out).nbytes = elements * out.element_size()
        self._write_down(span, func, args, kwargs, out, read, made)
        inside = 0 if self._on_cpu else scratch_bytes(func, args, out)
        span.peak_bytes = max(span.peak_bytes, self._poll() + inside)
        return out

    def run(self, span: Span, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run one operator of a span; for subclasses to time."""
        return self._result(func, args, kwargs)

    def _result(self, func: Any, args: tuple, kwargs: dict) -> Any:
        known = NotImplemented if self._fakes is None else self._fakes.recalled(func, args, kwargs)
        return func(*args, **kwargs) if known is NotImplemented else known

    def _write_down(self, span: Span, func: Any, args: tuple, kwargs: dict, out: Any, read: dict, made: dict) -> None:
        span.ops.append(func._schema.name)
        span.draws = span.draws or _draws(func, args, kwargs)
        self._reads(span, read)
        fresh = {i: t for i, t in made.items() if i not in read}
        changed = fresh if not func._schema.is_mutable else made
        span.writes.update(dict.fromkeys(changed))
        if not changed:
            return
        span.sources.update(self._sources(func, args, out, read, changed))
        span.unasked_bytes = max(span.unasked_bytes, unasked_bytes(func, args))
        span.reads_input = span.reads_input or (self._on_cpu and reads_input(func, args))
        span.moved_bytes += sum(t.numel() * t.element_size() for t in (*read.values(), *changed.values()))
        span.dtype = span.dtype or next((dtype_name(t.dtype) for t in changed.values() if t.is_floating_point()), "")
        count = self._flops.get(func._overloadpacket)
        if count is not None:
            with suppress(AssertionError):  # of attentions with fewer heads of keys, which PyTorch does not count
                span.flops += int(count(*args, **kwargs, out_val=out))
        if func is _aten.convolution.default:
            span.conv = (*(tuple(t.shape) for t in args[:2]), tuple(out.shape), *args[3:6], args[8])

    def _sources(self, func: Any, args: tuple, out: Any, read: dict, made: dict) -> dict[int, frozenset[int]]:
        if func is not CONV_BACKWARD:
            return dict.fromkeys(made, frozenset(read))
        grad, x, weight = (self._note(t).id for t in args[:3])
        pairs = zip(out, ((grad, weight), (grad, x), (grad, x)), strict=True)  # of input, weight and bias
        found = {self._note(t).id: frozenset(of) for t, of in pairs if t is not None}
        return {i: of for i, of in found.items() if i in made}


def _draws(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an operator draws random numbers: one of a generator, unless it is told not to."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in _DRAWING:
            given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            if given is not None and not given:  # dropout's None is True
                return False
    return True


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (t for t in tensors_in(value) if t.layout == torch.strided)
