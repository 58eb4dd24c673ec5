"""Dataclasses as JSON text and back, by msgspec: every field is checked against the type that it is declared with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def to_json(item: Any, *, indent: int = 0, **header: Any) -> str:
    """A dataclass as JSON text, behind the fields of a ``header`` such as format and version."""
    text = msgspec.json.encode({**header, **msgspec.to_builtins(item, str_keys=True)})
    return (msgspec.json.format(text, indent=indent) if indent else text).decode()


def spelling(item: Any) -> bytes:
    """The one JSON text of a dataclass whatever file it was read from: for hashes."""
    return msgspec.json.encode(msgspec.to_builtins(item, str_keys=True), order="deterministic")


def from_json(kind: type[T], text: str | bytes, header: dict[str, Any] | None = None) -> tuple[T, dict[str, Any]]:
    """The dataclass of :func:`to_json`'s text, and what the file says by the names in ``header``. ``header`` holds what
    the file must say by name, None for anything. Raises ValueError for any other text: the place in it, what was
    expected there and what it has."""
    try:
        raw: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ValueError(f"expected JSON, got other text ({error})") from error
    said: dict[str, Any] = {}
    for name, wanted in (header or {}).items():
        said[name] = raw.pop(name, None) if isinstance(raw, dict) else None
        if wanted is not None and said[name] != wanted:
            raise ValueError(f"{name}: expected {wanted!r}, got {said[name]!r}")
    try:
        item = msgspec.convert(raw, kind, str_keys=True)
        known = msgspec.to_builtins(item, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(_placed(str(error))) from error
    except RecursionError as error:
        raise ValueError("expected an object, got brackets within brackets without end") from error
    unknown = next(_unknown(raw, known, ""), None)
    if unknown is not None:
        raise ValueError(f"{unknown}: expected no such field")
    return item, said


def _placed(message: str) -> str:
    """msgspec's message with the place in front: ``decisions[0].storage: expected `int`, got `str```."""
    what, _, where = message.partition(" - at ")
    what, key = f"{what[0].lower()}{what[1:]}", "a key of " if where.startswith("`key`") else ""
    where = re.sub(r"^(`key` in )?`\$\.?|`$", "", where)
    return f"{key}{where}: {what}" if where else what


def _unknown(raw: Any, known: Any, where: str) -> Iterator[str]:
    """The places of fields that no dataclass has taken."""
    if isinstance(raw, dict):
        for name, value in raw.items():
            place = f"{where}.{name}" if where else name
            if name in known:
                yield from _unknown(value, known[name], place)
            else:
                yield place
    elif isinstance(raw, list):
        for number, (value, taken) in enumerate(zip(raw, known, strict=True)):
            yield from _unknown(value, taken, f"{where}[{number}]")
