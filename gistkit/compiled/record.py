"""What was decided for the graphs of a compiled model (:class:`gistkit.ir.GraphRecord`), on its way to the report.

The partitioner writes a :class:`GraphRecord` to the collection that is open around it. A graph that comes out of
PyTorch's caches was not partitioned here; its record then comes from a file beside gistkit's other caches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

import msgspec

from gistkit.ir import GraphRecord
from gistkit.profiling import cache_folder

_OPEN: ContextVar[list[GraphRecord] | None] = ContextVar("gistkit_records", default=None)


@contextmanager
def collected() -> Iterator[list[GraphRecord]]:
    """The records that are written inside."""
    found: list[GraphRecord] = []
    token = _OPEN.set(found)
    try:
        yield found
    finally:
        _OPEN.reset(token)


def write(record: GraphRecord) -> None:
    """Hand a record to the collection around; without one it is dropped."""
    if (found := _OPEN.get()) is not None:
        found.append(record)


def remember(key: str, records: list[GraphRecord]) -> None:
    """Write records to the cache. What cannot be written is left out: only a report would miss it."""
    path = cache_folder() / "compiled" / f"{key}.json"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(msgspec.json.encode(records))
        part.replace(path)


def recalled(key: str) -> list[GraphRecord]:
    """The records under a key, none where there is no file that can be read."""
    try:
        return msgspec.json.decode((cache_folder() / "compiled" / f"{key}.json").read_bytes(), type=list[GraphRecord])
    except (OSError, msgspec.MsgspecError):
        return []
