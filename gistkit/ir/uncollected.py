"""Python's collection of cyclic garbage, off while a step is captured or planned.

Both make millions of small objects that stay: the collector would take a sixth of the time of a ResNet-152 and find
nothing. The switch is the whole process's: other threads' garbage waits as long.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """A context manager, also usable as a decorator, that turns Python's garbage collector off and restores it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
