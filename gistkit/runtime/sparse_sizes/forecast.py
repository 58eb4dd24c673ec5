"""How many elements of a storage will not be zero: as many as in the last step, and two points of share more (0.50
becomes 0.52), points, not percent, as shares near zero move as much (docs/log.md). On the CPU (docs/kernels.md) the
arrays are 4.3 % larger then than what is in them, and 0.8 % of the encodings larger than that. With one point it would
be 2.3 % and 3.6 %, with three 6.3 % and 0.1 %."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

MARGIN = 0.02
SHOWN = 3
Spilled = dict[int, tuple[int, int]]
"""By storage the last step in which it had more elements than forecast, and what they took in bytes."""


class Forecast(NamedTuple):
    """What is expected of one storage (``share``: of elements that are not zero; None: nothing is known).
    ``heard(share, spilled bytes)`` is called when the count has reached the host."""

    share: float | None
    heard: Callable[[float, int], None]


class Forecasts:
    """One forward's: the ``shares`` by storage, ``learn`` that takes in those of a step, and ``spilled``, a note of
    what went beyond a forecast. Counts may arrive when forward and backward are long over, so this holds no tensors."""

    def __init__(
        self, shares: Mapping[int, float], learn: Callable[[Mapping[int, float]], None], spilled: Spilled, step: int
    ) -> None:
        self._shares, self._learn, self._spilled, self._step = shares, learn, spilled, step

    def of(self, storage: int) -> Forecast | None:
        """The forecast of a planned storage; None for -1, which is none."""
        return Forecast(self._shares.get(storage), partial(self._heard, storage)) if storage >= 0 else None

    def _heard(self, storage: int, share: float, spilled_bytes: int) -> None:
        self._learn({storage: share})
        if spilled_bytes:
            self._spilled[storage] = self._step, spilled_bytes


def spilled_note(spilled: Spilled, step: int) -> str:
    """Which storages went beyond their forecasts in a step, in words; empty where none did."""
    beyond = [(nbytes, storage) for storage, (when, nbytes) in list(spilled.items()) if when == step]
    found = sorted(beyond, reverse=True)
    if not found:
        return ""
    worst = ", ".join(f"storage {storage} by {nbytes} bytes" for nbytes, storage in found[:SHOWN])
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return (
        f"denser than the steps before: {worst}{more}; what was beyond the forecast is in the host's memory until it "
        "is used, which is slower, not wrong"
    )
