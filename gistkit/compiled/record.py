"""What was decided for the graphs of a compiled model (:class:`gistkit.ir.GraphRecord`), on its way to the report.

The partitioner writes a :class:`GraphRecord` to the collection that is open around it. A graph that comes out of
PyTorch's caches was not partitioned here; its record then comes from a file beside gistkit's other caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import msgspec

from gistkit.ir import GraphRecord
from gistkit.profiling import cache_folder, write_cached

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
    write_cached(_file(key), msgspec.json.encode(records))


def recalled(key: str) -> list[GraphRecord]:
    """The records under a key, none where there is no file that can be read."""
    try:
        return msgspec.json.decode(_file(key).read_bytes(), type=list[GraphRecord])
    except (OSError, msgspec.MsgspecError):
        return []


def _file(key: str) -> Path:
    return cache_folder() / "compiled" / f"{key}.json"
