"""A line in the log where something takes long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger("gistkit")


@contextmanager
def announced(what: str, after_s: float = 3.0) -> Iterator[None]:
    """Logs once that ``what`` is still going on, should the block take longer than ``after_s`` seconds."""
    timer = threading.Timer(after_s, _log.warning, ("%s: more than %g s so far", what, after_s))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
