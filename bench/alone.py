"""One process at a time on the device."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """While this is open, no other process with the same lock is in here."""
    if lock is None:
        yield
        return
    with open(lock, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
