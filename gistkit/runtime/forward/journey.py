"""What one forward sends to the host, and the moments at which its plan wants that gone and back."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from gistkit.codecs import Encoded
from gistkit.runtime.offload.backends import backend_for
from gistkit.runtime.offload.offloader import Offloader
from gistkit.runtime.offload.parcel import Parcel
from gistkit.runtime.program.timetable import Due, Timetable

NO_BOUND = 2**62
"""Sources and arrivals in flight are bounded by the plan's points of release and prefetch."""


class Journey:
    """One forward's parcels by storage. It holds none of them: they live as long as what backward nodes keep.
    ``offloads``: the offloaders of one engine, one a device, made when something is first sent from there."""

    def __init__(self, times: Timetable, offloads: dict[torch.device, Offloader]) -> None:
        self._times, self._offloads = times, offloads
        self._sent: defaultdict[int, list[weakref.ref]] = defaultdict(list)
        self._leaving: list[tuple[int, weakref.ref]] = []
        self._ended = -1

    def put(self, storage: int, what: torch.Tensor | Encoded, device: torch.device) -> Parcel:
        """Send what is of that storage; it leaves and comes back when the plan says so. Raises HostMemoryError where
        the host has not the memory that the plan needs."""
        if device not in self._offloads:
            sizes = self._times.arena_bytes, NO_BOUND, NO_BOUND, self._times.lane_bytes
            self._offloads[device] = Offloader(backend_for(device), *sizes)
        sent = self._offloads[device].put(what)
        ref = weakref.ref(sent)
        self._sent[storage].append(ref)
        call = self._times.leaves.get(storage, NO_BOUND)
        if call <= self._ended:
            sent.release()
        else:
            self._leaving.append((call, ref))
        return sent

    def reached(self, call: int) -> None:
        """A covered call begins, or has ended: what its plan wants gone by then is let go of."""
        due = [ref for leaves, ref in self._leaving if leaves <= call]
        if due:
            self._leaving = [item for item in self._leaving if item[0] > call]
            _each(due, "release")

    def ran(self, call: int, y: Any) -> None:
        """The covered call has made y, whose backward brings others back."""
        self.reached(call)
        self._ended = call
        due = self._times.backward.get(call)
        node = getattr(y, "grad_fn", None)
        if due is not None and node is not None:
            node.register_prehook(_before(self._sent, due))

    def end(self) -> None:
        """The forward has ended: what is not to go in backward goes."""
        self.reached(NO_BOUND - 1)


def _before(sent: dict[int, list[weakref.ref]], due: Due) -> Callable[[Any], None]:
    def run(_: Any) -> None:
        for storage in due.released:
            _each(sent.get(storage, ()), "release")
        for storage in due.fetched:
            _each(sent.get(storage, ()), "prefetch")

    return run


def _each(refs: Any, method: str) -> None:
    for ref in refs:
        sent = ref()
        if sent is not None:
            getattr(sent, method)()
