"""Sparse encodings whose counts are on their way to the host (:mod:`gistkit.runtime.sparse_sizes.exact`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from gistkit.codecs import Encoded, Sparse
from gistkit.runtime.sparse_sizes.counts import Stream, Ticket
from gistkit.runtime.sparse_sizes.forecast import Forecast

Settle = Callable[[Encoded, int], None]
"""What becomes of a pending encoding when its count is known."""


class Waiting(NamedTuple):
    """An encoding that waits for its count with its scratch: weakly held, so that one that is no longer wanted goes
    with it. ``why``: why it was not packed within a forecast."""

    encoded: weakref.ref[Encoded]
    settle: Settle | weakref.WeakMethod[Settle]
    ticket: Ticket
    stream: Stream
    number: int
    forecast: Forecast | None
    why: str
    elements: int

    def settled(self, encoded: Encoded, total: int) -> None:
        """Give the encoding its final form."""
        settle = self.settle() if isinstance(self.settle, weakref.WeakMethod) else self.settle
        if settle is not None:
            settle(encoded, total)

    def tell(self, total: int) -> None:
        """Say how much was stored."""
        if self.forecast is not None:
            self.forecast.heard(total / self.elements, 0)


class Within(NamedTuple):
    """An encoding that was packed within a forecast, and whose count is on its way."""

    encoded: weakref.ref[Encoded]
    codec: Sparse
    ticket: Ticket
    forecast: Forecast
    capacity: int
    elements: int
    dtype: torch.dtype

    def arrived(self, total: int) -> bool:
        """Take the count in; whether anybody still wants the encoding."""
        encoded = self.encoded()
        if encoded is not None:
            self.codec.settle(encoded, total)
        beyond_bytes = self._bytes(total) - self._bytes(self.capacity) if total > self.capacity else 0
        self.forecast.heard(total / self.elements, beyond_bytes)
        return encoded is not None

    def _bytes(self, items: int) -> int:
        return self.codec.within_bytes(self.elements, self.dtype, items)
