"""Plan: what happens to every storage of a step between its two uses. Pure data, JSON both ways."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

PLACES = ("device", "nowhere")


@dataclass(frozen=True)
class Decision:
    """How one storage spends the time between its two uses.

    ``codec`` is a name of CODECS, ``dense`` (the tensor itself is kept), ``rebuild`` (recomputed from the storages in
    ``sources`` by the ops that made it, place ``nowhere``) or ``drop`` (nobody reads its values). ``mask`` says that
    the ReLU that made it keeps a 1-bit mask of its own beside it. ``recipe`` says how a rebuilt storage comes about, as
    nested tuples: ``("bn", covered call)``, ``("stash", storage)``, ``("add", a, b)``, ``("relu", a)``. ``reason`` is
    shown by the report.
    """

    storage: int
    codec: str
    place: str = "device"
    mask: bool = False
    sources: tuple[int, ...] = ()
    reason: str = ""
    recipe: tuple = ()


@dataclass(frozen=True)
class CallChoice:
    """How one covered call runs: ``inplace`` for a ReLU that may overwrite its input, ``zero_code`` for a max-pool
    whose map also carries the ReLU's mask, ``passes`` for that ReLU (its backward is the identity)."""

    covered: int
    op: str
    inplace: bool = False
    zero_code: bool = False
    passes: bool = False


@dataclass(frozen=True)
class Plan:
    """All decisions of one step, by storage and by covered call, with the predicted bytes kept for backward."""

    policy: str
    fingerprint: str
    decisions: tuple[Decision, ...]
    choices: tuple[CallChoice, ...]
    plain_bytes: int = 0
    kept_bytes: int = 0
    settings: dict = field(default_factory=dict)

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan of :meth:`to_json`'s text."""
        raw = json.loads(text)
        raw["decisions"] = tuple(
            Decision(**{**d, "sources": tuple(d["sources"]), "recipe": _tuples(d["recipe"])}) for d in raw["decisions"]
        )
        raw["choices"] = tuple(CallChoice(**c) for c in raw["choices"])
        return Plan(**raw)


def _tuples(item: Any) -> Any:
    """Nested lists, as JSON knows them, as nested tuples."""
    return tuple(_tuples(part) for part in item) if isinstance(item, list) else item
