"""Python's collection of cyclic garbage, off while a step is captured or planned.

Both make millions of small objects that stay, which the collector would go through again and again: a sixth of the time
of a ResNet-152, and nothing to be found. The switch is the whole process's: other threads' garbage waits as long.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """A context, or a function's decorator, in which nothing is collected but on demand; as before behind it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
