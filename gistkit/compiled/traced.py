"""``torch.compile`` of a model that ``gistkit.compress`` has compressed: its own forward is traced, gistkit cuts.

While Dynamo traces a compressed forward it calls :func:`note`, which remembers the settings for the graph that is being
traced and makes :class:`~gistkit.compiled.custom.ForTraced` Inductor's partitioner. Others it cuts as PyTorch does.
"""

from __future__ import annotations

import weakref
from typing import Any

from gistkit.compiled import compat
from gistkit.compiled.moves import Settings
from gistkit.compiled.record import GraphRecord
from gistkit.errors import CompileError
from gistkit.runtime import WHEN_TRACED, CompressedForward

_SETTINGS: weakref.WeakKeyDictionary[Any, Settings] = weakref.WeakKeyDictionary()
_OWNERS: weakref.WeakKeyDictionary[Any, list[CompressedForward]] = weakref.WeakKeyDictionary()
_RECORDS: weakref.WeakKeyDictionary[Any, dict[tuple[int, int], list[GraphRecord]]] = weakref.WeakKeyDictionary()
"""By the number of the Python frame: one that is compiled again takes the place of the first."""


def note(stand_in: CompressedForward) -> None:
    """A compressed forward is being traced. Raises CompileError where the same graph has another one under other
    settings."""
    from gistkit.compiled.custom import ForTraced  # imports Inductor

    context, asked = compat.tracing_context(), stand_in.engine.settings
    if context is None:
        return
    settings = Settings(asked.lossy, asked.fidelity)
    known = _SETTINGS.setdefault(context, settings)
    if known != settings:
        raise CompileError(
            f"compile: compressed models in one graph must have the same settings, got {known} and {settings}; "
            "compress the module around them instead"
        )
    owners = _OWNERS.setdefault(context, [])
    if stand_in not in owners:
        owners.append(stand_in)
    _RECORDS.setdefault(stand_in, {})
    compat.set_partitioner(ForTraced())


def settings_in_force() -> Settings | None:
    """The settings of the graph that is being compiled; None where it has no compressed forward."""
    context = compat.tracing_context()
    return None if context is None else _SETTINGS.get(context)


def remember(records: list[GraphRecord]) -> None:
    """What was decided for the graph that is being compiled, for the reports of its models."""
    for stand_in in _OWNERS.get(compat.tracing_context(), ()):
        _RECORDS[stand_in][compat.frame()] = records


def records_of(stand_in: CompressedForward) -> list[GraphRecord] | None:
    """What was decided for graphs of a compressed model in this process, nothing for those that came from PyTorch's
    caches; None where torch.compile has not traced the model."""
    found = _RECORDS.get(stand_in)
    return None if found is None else [r for records in found.values() for r in records]


WHEN_TRACED.append(note)
