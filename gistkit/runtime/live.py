"""Live tensor bytes, measured on any device: which storages exist after every operator.

A dispatch mode sees every operator that runs, notes the storages of its outputs by weak reference (identity is the live
storage, never an address), and asks after each operator which of them still exist: without a timeline only where those
counted last and what was made or grew since come to more than the peak. Live bytes rise only inside operators and fall
only between them, so the bytes right after every operator give the exact peak at operator granularity.

What an operator allocates and frees inside itself is not seen: PyTorch's own workspaces, and temporaries of the CPU
form of ``gistkit::*``. Sparse and opaque tensors, which have no storage, are not counted either."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch._C import _current_graph_task_id  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gistkit.capture import tensors_in

# Python's torch.tensor fills its storage before the dispatcher first sees it, as the argument of this operator.
_FRESH_INPUT = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class LiveEvent(NamedTuple):
    """Live bytes right after one operator: its name (``aten::relu``), the bytes, whether a backward pass called it."""

    op: str
    nbytes: int
    backward: bool


class Mark(NamedTuple):
    """A named moment: the number of events before it, the live bytes at it."""

    label: str
    index: int
    nbytes: int


class LiveBytes(TorchDispatchMode):
    """Context manager that measures the bytes of the tensors made inside it.

    ::

        with LiveBytes() as live:
            loss = model(x).sum()
            live.mark("forward end")
            loss.backward()
        print(live.peak_bytes, live.current_bytes)

    A storage counts from the operator that makes it until nobody holds it, each storage once, at its present size.
    Storages from before the block (parameters, inputs) do not count unless given to :meth:`track`. The tracker holds
    nothing alive, and ``current_bytes`` stays right after the block. Under FakeTensorMode the nominal bytes of the fake
    tensors count; fake tensors of a FakeTensorMode that begins inside the block do not, for they occupy no memory.

    A mode belongs to its thread. Autograd passes it on to the device threads that it starts itself, other threads are
    not seen. Costs about 12 us for each operator, and 0.2 us a live storage where it asks. Never synchronises. Raises
    RuntimeError when entered a second time while active. With ``timeline=False`` there is the peak and no ``timeline``.
    """

    def __init__(self, timeline: bool = True) -> None:
        super().__init__()
        self._live: dict[int, StorageWeakRef] = {}
        self._sizes: dict[int, int] = {}
        self._most_bytes = 0  # what is live is at most this
        self._keeps_timeline = timeline
        self._lock = threading.RLock()
        self._active = False
        self._counts_fake = False
        self._peak_bytes = 0
        self.timeline: list[LiveEvent] = []
        self.marks: list[Mark] = []

    def __enter__(self) -> LiveBytes:
        if self._active:
            raise RuntimeError("this LiveBytes is active already; make a new one for a nested measurement")
        self._active = True
        # A dispatch mode of the user sees operators before FakeTensorMode does, whichever was entered first.
        fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)  # type: ignore[attr-defined]
        self._counts_fake = fake is not None
        super().__enter__()
        return self

    def __exit__(self, exc_type, exc_val, exc_tb) -> None:
        self._active = False
        super().__exit__(exc_type, exc_val, exc_tb)

    @property
    def current_bytes(self) -> int:
        """Bytes of all counted storages that exist now."""
        with self._lock:
            return self._poll()

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were live at once since the block began or since :meth:`reset_peak`."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Begin a new peak at the present bytes."""
        self._peak_bytes = self.current_bytes

    def mark(self, label: str) -> int:
        """Note a named moment in ``marks``; returns the bytes live at it."""
        nbytes = self.current_bytes
        self.marks.append(Mark(label, len(self.timeline), nbytes))
        return nbytes

    def track(self, *things: torch.Tensor | torch.nn.Module) -> None:
        """Count storages from before the block too: tensors, or all parameters and buffers of modules.

        Raises TypeError for anything else.
        """
        for thing in things:
            if isinstance(thing, torch.nn.Module):
                self.track(*thing.parameters(), *thing.buffers())
            elif isinstance(thing, torch.Tensor):
                with self._lock:
                    self._count(thing)
            else:
                raise TypeError(f"track() takes tensors and modules, got {type(thing).__name__}; pass its tensors")
        self._peak_bytes = max(self._peak_bytes, self.current_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        operands = [*tensors_in(args), *tensors_in(kwargs)]
        given = () if func in _FRESH_INPUT else map(self._storage, operands)
        outside = {s._cdata for s in given if s is not None}  # their views do not count, unless they do themselves
        result = func(*args, **kwargs)
        with self._lock:
            for tensor in tensors_in(result):
                self._count(tensor, outside)
            schema = getattr(func, "_schema", None)
            if schema is None or schema.is_mutable:
                self._grown(operands)
            if self._keeps_timeline or self._most_bytes > self._peak_bytes:
                self._peak_bytes = max(self._peak_bytes, self._poll())
            if self._keeps_timeline:
                self.timeline.append(LiveEvent(func._schema.name, self._most_bytes, _current_graph_task_id() != -1))
        return result

    def _poll(self) -> int:
        """Forget dead storages; the bytes of the others, read anew because a storage may be resized in place."""
        for cdata in tuple(self._live):
            storage = torch.UntypedStorage._new_with_weak_ptr(cdata)  # type: ignore[attr-defined]
            if storage is None:
                del self._live[cdata], self._sizes[cdata]
            else:
                self._sizes[cdata] = storage.nbytes()
        self._most_bytes = sum(self._sizes.values())
        return self._most_bytes

    def _grown(self, tensors: Iterable[torch.Tensor]) -> None:
        """Add to what is live at most by how much the storages of tensors are larger than when they were noted."""
        for storage in map(self._storage, tensors):
            noted = None if storage is None else self._sizes.get(storage._cdata)
            if storage is not None and noted is not None and storage.nbytes() > noted:
                self._most_bytes += storage.nbytes() - noted
                self._sizes[storage._cdata] = storage.nbytes()

    def _count(self, tensor: torch.Tensor, outside: Collection[int] = ()) -> None:
        storage = self._storage(tensor)
        if storage is not None and storage._cdata not in self._live and storage._cdata not in outside:
            self._live[storage._cdata] = StorageWeakRef(storage)
            self._sizes[storage._cdata] = storage.nbytes()
            self._most_bytes += storage.nbytes()

    def _storage(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        if tensor.layout != torch.strided or tensor.is_mkldnn:
            return None
        if (isinstance(tensor, FakeTensor) and not self._counts_fake) or tensor.device.type == "meta":
            return None
        return tensor.untyped_storage()
