"""Recorder: watches one forward, fake or real, and writes down its SavedGraph.

A TorchFunctionMode sees the calls, a pair of saved-tensor hooks what each call saves, and two module hooks keep the
name of the module at work. :mod:`gistkit.capture.assemble` names nodes and fields afterwards.

The hooks hand back the very tensors they were given, with PyTorch's own version check, so a recorded real step computes
and keeps what the plain step does; calls inside a checkpoint save under the checkpoint's hooks and stay invisible here.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from gistkit.capture import calls
from gistkit.capture.assemble import assemble
from gistkit.capture.ledger import Notes, OpenCall, Packed, StorageEntry, dtype_name, identity, living, tensors_in
from gistkit.capture.nodes import is_parameter, is_weight
from gistkit.errors import CaptureError
from gistkit.ir import ModuleCall, SavedGraph, StateTensor

_autograd = torch._C._autograd  # type: ignore[attr-defined]

_METADATA = {"size", "dim", "stride", "numel", "nelement", "ndimension", "element_size", "storage_offset", "get_device"}
_METADATA |= {"__len__", "__hash__", "__repr__", "__format__", "_is_view", "type", "has_names"}


class Recorder(TorchFunctionMode):
    """Records one forward on one thread: ``with Recorder(model) as rec: out = model(x)``, then ``rec.finish(out)``.

    ``source`` is ``real`` or ``fake``; real recordings measure densities when they finish, which waits for the device.
    With ``light`` saved tensors are let go of at the end of their call and unwritten memory stands in for them, so that
    the lives of fake tensors can be watched (:mod:`gistkit.capture.step.trace`).

    ``notes`` is what was written down so far. ``current`` is the provisional number of the call that runs now.
    ``saved`` is called with what a call or node saves, if ``light``.
    ``unpacked`` makes the stand-ins that backward unpacks, given a function that makes one and its storage. ``dropped``
    is called with the storage that a node held which died before the forward was done: a branch that leads nowhere.
    """

    def __init__(self, model: torch.nn.Module, *, source: str = "real", light: bool = False) -> None:
        super().__init__()
        self.notes = Notes(source)
        self.unpacked: Callable[[Callable[[], torch.Tensor], int | None], torch.Tensor] | None = None
        self.dropped: Callable[[int], None] | None = None
        self.saved: Callable[[torch.Tensor], None] | None = None
        self._light = light
        self._call: OpenCall | None = None
        self._busy = False
        self._covered = 0
        self._stack: list[str] = []
        self._entered: list[tuple[ModuleCall, tuple, int] | None] = []
        self._pack_hook: Callable = self._pack
        self._model: torch.nn.Module | None = model
        self._names = {id(module): name for name, module in model.named_modules()}
        for parameter in model.parameters():
            self.notes.ledger.storage_of(parameter, "parameter")
        for buffer in model.buffers():
            self.notes.ledger.storage_of(buffer, "buffer")

    def __enter__(self) -> Recorder:
        self.notes.first_node = _autograd._get_sequence_nr()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack_hook, self._unpack)
        self._hooks.__enter__()
        self._watch_modules()
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc, traceback)
        for handle in self._handles:
            handle.remove()
        self._hooks.__exit__()

    def _watch_modules(self) -> None:
        thread = threading.get_ident()

        def enter(module, args):
            if threading.get_ident() == thread and id(module) in self._names:
                self._stack.append(self._names[id(module)])
                self._entered.append(None)

        def given(module, args, kwargs):
            if threading.get_ident() == thread and self._stack and self._stack[-1] == self._names[id(module)]:
                call = self._given(self._stack[-1], (args, *kwargs.values()))
                self._entered[-1] = None if call is None else (call, _python_draws(), _autograd._get_sequence_nr())

        def leave(module, args, output):
            if threading.get_ident() == thread and id(module) in self._names and self._stack:
                self._stack.pop()
                entered = self._entered.pop()
                if entered is not None and entered[1] == _python_draws():
                    nodes = entered[2], _autograd._get_sequence_nr()
                    self.notes.modules.append((replace(entered[0], end=len(self.notes.calls)), nodes))

        hooks = torch.nn.modules.module
        self._handles = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        ]
        for module in self._model.modules() if self._light and self._model is not None else ():  # a copy's
            self._handles.append(module.register_forward_pre_hook(given, with_kwargs=True))

    def _given(self, name: str, given: tuple) -> ModuleCall | None:
        """A module's call that begins; None for one on more than tensors and what stays as it is."""
        busy, self._busy = self._busy, True
        try:
            if not _is_plain(given):
                return None
            known = (self.notes.ledger.known(identity(t)) or self._first_sight(t) for t in tensors_in(given))
            return ModuleCall(name, len(self.notes.calls), -1, tuple({e.id: None for e in known if e is not None}))
        finally:
            self._busy = busy

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or self._busy or is_metadata(func):
            return func(*args, **kwargs)
        call = self._call = self._begin(func, args, kwargs)
        try:
            out = func(*args, **kwargs)
        finally:
            self._call = None
        self._end(call, out)
        return out

    @property
    def current(self) -> int | None:
        return None if self._call is None else self._call.number  # type: ignore[return-value]

    def _begin(self, func: Callable, args: tuple, kwargs: dict) -> OpenCall:
        bound = calls.bind(func, args, kwargs)
        module = self._stack[-1] if self._stack else ""
        call = OpenCall(len(self.notes.calls), op_name(func), module, _autograd._get_sequence_nr())
        if bound is not None:
            call.options, call.split = calls.options(bound), calls.is_split(bound)
            if calls.is_counted(bound) and calls.region_is_open(self._pack_hook):
                call.covered = self._covered
                self._covered += 1
        elif strange := calls.opaque(args, kwargs):
            call.options = {"opaque": strange}
        elif any(isinstance(v, torch.Generator) for v in (*args, *kwargs.values())):
            call.options = {"generator": True}
        for t in calls.operands(bound) if bound is not None else tensors_in((args, kwargs)):
            self._read(call, t)
        return call

    def _read(self, call: OpenCall, t: torch.Tensor) -> None:
        ledger = self.notes.ledger
        entry = ledger.known(identity(t)) or self._first_sight(t)
        if entry is not None:
            call.versions.append((t, entry, _version(t)))
            call.operands.append(ledger.value_of(t, entry, entry.producer))
            call.reads[entry.id] = None

    def _first_sight(self, t: torch.Tensor) -> StorageEntry | None:
        """The entry of a tensor that no recorded call returned: a weight, an input, a hidden function's result."""
        ledger, node = self.notes.ledger, t.grad_fn
        if is_weight(t):
            return ledger.storage_of(t, "parameter")
        if node is None or node._sequence_nr() < self.notes.first_node:
            return ledger.storage_of(t, "input")
        sequence = node._sequence_nr()
        entry = ledger.storage_of(t, "activation", ("node", sequence))
        if entry is not None:
            self.notes.by_node[sequence, t.output_nr] = ledger.value_of(t, entry, entry.producer)
            ledger.watch(t, entry)
        return entry

    def _end(self, call: OpenCall, out: Any) -> None:
        notes, ledger = self.notes, self.notes.ledger
        written = {entry.id: entry for t, entry, before in call.versions if _version(t) != before}
        for packed in living(call.packs):
            if packed.storage is not None:
                entry = ledger.storages[packed.storage]  # if overwritten, saved before or after the write
                after = packed.storage in written and packed.version == packed.tensor._version
                packed.value = ledger.value_of(packed.tensor, entry, call.number, entry.version + after)
                if entry.producer == call.number:
                    call.writes[entry.id] = None
            if self._light:
                packed.lighten()
        for entry in written.values():
            entry.version += 1
            call.writes[entry.id] = None
        call.inplace = bool(call.versions) and call.versions[0][1].id in written
        call.versions.clear()
        for t in tensors_in(out):
            entry = ledger.storage_of(t, "activation", call.number)
            if entry is None:
                continue
            value = ledger.value_of(t, entry, call.number)
            call.results.append(value)
            if entry.producer == call.number:
                call.writes[entry.id] = None
            if t.grad_fn is not None:
                notes.by_node[t.grad_fn._sequence_nr(), t.output_nr] = value
            ledger.watch(t, entry)
        call.hi = _autograd._get_sequence_nr()
        notes.calls.append(call)

    def _pack(self, t: torch.Tensor) -> Packed:
        busy, self._busy = self._busy, True
        try:
            notes, call = self.notes, self._call
            sequence = _autograd._get_sequence_nr() - 1
            origin = ("node", sequence) if call is None else call.number
            entry = notes.ledger.storage_of(t, "parameter" if is_weight(t) else "activation", origin)
            if entry is not None and is_parameter(t):
                entry.kind = "parameter"  # also where fully_shard gathered it within the forward: a call's result then
            if not self._light or entry is None or t._is_view():
                t = t.detach()
            elif self.saved is not None:
                self.saved(t)
            packed = Packed(t, sequence, None if entry is None else entry.id)
            dropped, storage = self.dropped, packed.storage
            ref = weakref.ref(packed, None if dropped is None or storage is None else lambda _: dropped(storage))
            if call is not None:
                call.packs.append(ref)
                # what has no storage (a nested tensor) may have no shape either
                call.packed.append((packed.storage, dtype_name(t.dtype), () if entry is None else tuple(t.shape)))
                return packed
            notes.loose.append(ref)
            if entry is not None:
                packed.value = notes.ledger.value_of(packed.tensor, entry, origin)
            if self._light:
                packed.lighten()
            return packed
        finally:
            self._busy = busy

    def _unpack(self, packed: Packed) -> torch.Tensor:
        if self.unpacked is None:
            return packed.checked()
        return self.unpacked(packed.checked, packed.storage)

    def finish(self, out: Any) -> SavedGraph:
        """The graph of the recorded forward, whose result was ``out``; the recorder lets go of everything."""
        notes, self.notes = self.notes, Notes("finished")
        model, self._model = self._model, None
        assert model is not None, "a recorder records one forward"
        # parameters and buffers, each object once, in the order of the model's modules
        state = tuple(
            StateTensor(name, dtype_name(t.dtype), tuple(t.shape), t.requires_grad)
            for name, t in (*model.named_parameters(), *model.named_buffers())
        )
        graph, modules = assemble(notes, out), notes.modules_by_index()
        return replace(graph, state=state, training=model.training, modules=modules)


def _python_draws() -> tuple:
    """The states of the generators that nobody sets back for a module that runs anew: Python's and NumPy's."""
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2]


def _is_plain(item: Any) -> bool:
    """Whether an argument is a tensor, a plain value or a tuple of these: what nobody can change in place unseen."""
    if type(item) is tuple:
        return all(map(_is_plain, item))
    return isinstance(item, (torch.Tensor, *calls.PLAIN))


def op_name(func: Callable) -> str:
    """The covered op, or the plain name, of a function."""
    return calls.COVERED.get(func) or call_name(func)


def call_name(func: Callable) -> str:
    """A function's plain name: ``mul`` for Tensor.mul and mul_, ``grad_fn`` for the property of that name."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    if name.startswith("__") and name.endswith("__"):
        return name.strip("_")
    return name.rstrip("_") or name


def is_metadata(func: Callable) -> bool:
    """Whether a function tells only a tensor's geometry, type or flags."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return call_name(func) not in ("grad_fn", "data", "T", "mT", "H", "mH", "real", "imag", "grad")
    return name in _METADATA or name.startswith("is_")


def _version(t: torch.Tensor) -> int:
    try:
        return t._version
    except RuntimeError as error:
        raise CaptureError("a tensor made in inference mode takes part in training; make it outside of it") from error
