"""A line in the log where a first step keeps its user waiting."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

AFTER_S = 3.0
_log = logging.getLogger("gistkit")


@contextmanager
def announced(what: str, after_s: float = AFTER_S) -> Iterator[None]:
    """Logs a warning of the logger ``gistkit`` that ``what`` is still going on, once, should the block take longer than
    ``after_s`` seconds. Without logging handlers Python prints it to stderr."""
    timer = threading.Timer(after_s, _log.warning, ("%s: more than %g s so far", what, after_s))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
