"""What a call depends on besides its arguments: autocast and the random states, as they were in forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

AUTOCAST_DEVICES = ("cpu", "cuda")
AutocastState = tuple[tuple[bool, torch.dtype], ...]
RandomState = tuple[str, int, bytes]
"""Device type, index, state of its default generator."""


@dataclass(frozen=True)
class DrawnFrom:
    """A generator that a call was given, as it was before the call."""

    device: torch.device
    state: torch.Tensor

    def generator(self) -> torch.Generator:
        """A new one in that state."""
        return torch.Generator(self.device).set_state(self.state)


@contextmanager
def autocast(states: AutocastState) -> Iterator[None]:
    """Autocast as it was in forward, without its cache of casts."""
    with ExitStack() as stack:
        for device, (enabled, dtype) in zip(AUTOCAST_DEVICES, states, strict=True):
            if enabled or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
        yield


def autocast_now() -> AutocastState:
    """Autocast's state by device type."""
    return tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in AUTOCAST_DEVICES)


def random_state(device: str, index: int) -> bytes:
    """The state of a device's default generator, on the host."""
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(index)
    return state.numpy().tobytes()


def set_random(states: Iterable[RandomState]) -> None:
    """Put generators into these states."""
    for device, index, state in states:
        packed = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        torch.set_rng_state(packed) if device == "cpu" else torch.cuda.set_rng_state(packed, index)


@contextmanager
def random_states_back(states: list[RandomState]) -> Iterator[None]:
    """The random states as they are now, put back afterwards."""
    now = [(device, index, random_state(device, index)) for device, index in {s[:2] for s in states}]
    try:
        yield
    finally:
        set_random(now)
