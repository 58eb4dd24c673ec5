"""Plan: what happens to every storage of a step between its two uses. Pure data, JSON both ways."""

from __future__ import annotations

import hashlib
import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from math import isfinite
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from gistkit.errors import PlanError
from gistkit.ir.forms import FORMS, Form

PLACES = ("device", "host", "nowhere")
FORMAT, VERSION = "gistkit.plan", 3
TUPLES = ("sources", "recipe")
ASKED = "Plan.from_json: text must be that of Plan.to_json"
REMEDY = "give the whole file as to_json wrote it, or plan again"


@dataclass(frozen=True)
class Decision:
    """How one storage spends the time between its two uses.

    ``codec`` is the name of a form (:mod:`gistkit.ir.forms`); storages with the form ``recompute`` and the same
    ``sources`` come back together, at the first use of any of them.
    With place ``host`` the codec's payload (``dense``: the raw bytes) crosses the link: from the start of task
    ``offload`` on (-1: as soon as it is there), its device memory is let go of before task ``release`` begins, which
    waits for the transfer, and comes back from the start of task ``prefetch`` on; task ``ready`` (-1: its first use)
    waits until it is back.
    ``mask`` says that the ReLU that made it keeps a 1-bit mask of its own beside it. ``recipe`` says how a rebuilt
    storage comes about, as nested tuples: ``("bn", covered call)``, ``("stash", storage)``, ``("add", a, b)``,
    ``("relu", a)``. ``reason`` is shown by the report.
    """

    storage: int
    codec: str
    place: str = "device"
    mask: bool = False
    sources: tuple[int, ...] = ()
    reason: str = ""
    recipe: tuple = ()
    release: int = -1
    prefetch: int = -1
    ready: int = -1
    offload: int = -1

    @property
    def form(self) -> Form:
        """The form's row: what it keeps, and how its values come back."""
        return FORMS[self.codec]

    @property
    def on_host(self) -> bool:
        """Whether the payload lies in host memory between the uses."""
        return self.place == "host"

    @property
    def stays(self) -> bool:
        """Whether the tensor itself stays on the device."""
        return self.codec == "dense" and self.place == "device"


@dataclass(frozen=True)
class CallChoice:
    """How one covered call runs: ``inplace`` for a ReLU that may overwrite its input, ``zero_code`` for a max-pool
    whose map also carries the ReLU's mask, ``passes`` for that ReLU (its backward is the identity), ``slices`` for the
    batch slices in which a weight gradient is taken, ``algorithm`` for a convolution's: switches of cuDNN that the
    runtime sets (:mod:`gistkit.planning.cost.part_algorithms`), or a name that is planner data."""

    covered: int
    op: str
    inplace: bool = False
    zero_code: bool = False
    passes: bool = False
    slices: int = 1
    algorithm: str = ""


@dataclass(frozen=True)
class Plan:
    """All decisions of one step, by storage and by covered call, with what was predicted of it.

    ``plain_bytes`` and ``kept_bytes`` are what plain PyTorch and the plan keep for backward. Where a budget was planned
    for: ``peak_bytes`` is the most that the device holds during forward and backward (parameters, buffers, gradients,
    inputs, activations, stashes, decoded copies, workspace, reserve), ``step_s`` the device's seconds of forward and
    backward, both with transfers beside the computation. The runtime does not do that yet but copies in between:
    ``settings["wall_s"]`` has the whole time of every copy, and the host's share, in it, and
    ``settings["sync_peak_bytes"]`` is the most that the device holds then, the peak to expect: what leaves is gone once
    saved and back at its first use. ``lower_bound_bytes`` is the least peak that the allowed moves can reach, ``gap``
    how far ``step_s`` may be above the least possible (0.0: proven optimal; None: the policy proves nothing),
    ``sub_batches`` the parts in which the batch is taken. ``fidelity`` is ``bitwise``, ``reassociated`` or ``lossy``:
    the class of the moves really used. ``made_for`` is what the step must be besides
    (:mod:`gistkit.planning.contract`).
    """

    policy: str
    fingerprint: str
    decisions: tuple[Decision, ...]
    choices: tuple[CallChoice, ...]
    plain_bytes: int = 0
    kept_bytes: int = 0
    settings: dict = field(default_factory=dict)
    budget_bytes: int | None = None
    peak_bytes: int = 0
    step_s: float = 0.0
    lower_bound_bytes: int = 0
    gap: float | None = None
    sub_batches: int = 1
    fidelity: str = "bitwise"
    hardware: str = ""
    made_for: dict = field(default_factory=dict)

    def to_json(self) -> str:
        """The plan as JSON text."""
        told = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps({**told, "digest": _digest(told)})

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan of :meth:`to_json`'s text. Raises PlanError for text that is not one: what is wrong with it.

        Where the text has a ``digest``, all else must be what that was made of: decisions, figures, settings.
        """
        try:
            return _plan_of(_parsed(text))
        except RecursionError as error:
            raise PlanError(f"{ASKED}, got text of brackets within brackets beyond any plan's; {REMEDY}") from error


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError) as error:
        raise PlanError(f"{ASKED}, got text that is no JSON ({error}); {REMEDY}") from error


def _plan_of(raw: Any) -> Plan:
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        others = {k: v for k, v in raw.items() if k != "format"} if isinstance(raw, dict) else raw
        raise PlanError(f'{ASKED}, got {_summary(others)} without "format": {FORMAT!r}; {REMEDY}')
    if raw.get("version") != VERSION:
        got = f"version {raw.get('version')!r}"
        raise PlanError(f"{ASKED} of version {VERSION}, got {got}; plan again with this gistkit")
    digest = raw.pop("digest", None)
    told = {name: value for name, value in raw.items() if name not in ("format", "version")}
    plan = _read(Plan, {**told, "decisions": _each(Decision, raw), "choices": _each(CallChoice, raw)}, "plan")
    if digest is not None and digest != _digest({"format": FORMAT, "version": VERSION, **asdict(plan)}):
        raise PlanError(
            f"{ASKED}, got one that was edited after it was planned: its digest {digest!r} is not that of the "
            'decisions, figures and settings that it holds; plan again, or remove "digest" to run it at your own risk'
        )
    return plan


def _digest(told: dict) -> str:
    """Hash of all that a plan's file says, whatever the order of its fields and the spelling of its numbers."""
    return hashlib.sha256(json.dumps(_spelt(told), sort_keys=True).encode()).hexdigest()[:16]


def _spelt(item: Any) -> Any:
    """Nested data as any JSON has it: texts as keys, no whole number as a float."""
    if isinstance(item, dict):
        return {key if isinstance(key, str) else json.dumps(key): _spelt(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [_spelt(part) for part in item]
    return int(item) if isinstance(item, float) and item.is_integer() else item


def _summary(raw: Any) -> str:
    if isinstance(raw, dict):
        return f"an object with {', '.join(map(repr, list(raw)[:4]))}" if raw else "an empty object"
    return f"a {type(raw).__name__}"


def _each(kind: type, raw: dict) -> tuple:
    """The decisions or choices of a plan."""
    name = "decisions" if kind is Decision else "choices"
    items = raw.get(name)
    if not isinstance(items, list):
        raise PlanError(f"{ASKED}, got {name} that are {_summary(items)} and not a list; {REMEDY}")
    return tuple(_read(kind, item, f"{name}[{i}]") for i, item in enumerate(items))


def _read(kind: type, raw: Any, where: str) -> Any:
    """A dataclass from its fields, each of the type that it is declared with."""
    if not isinstance(raw, dict):
        raise PlanError(f"{ASKED}, got {where} that is {_summary(raw)} and not an object; {REMEDY}")
    hints = get_type_hints(kind)
    strange = sorted(set(raw) - set(hints))
    missing = sorted(f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)
    missing = [name for name in missing if name not in raw]
    if strange or missing:
        what = [f"the unknown field {name!r}" for name in strange] + [f"no {name!r}" for name in missing]
        raise PlanError(f"{ASKED}, got {where} with {', '.join(what)}; {REMEDY}")
    values = {name: _tuples(value) if name in TUPLES else value for name, value in raw.items()}
    for name, value in values.items():
        if not _is(value, hints[name]):
            raise PlanError(f"{ASKED}, got {where}.{name} = {value!r}; {REMEDY}")
    return kind(**values)


def _is(value: Any, hint: Any) -> bool:
    """Whether a value is of a field's type; no bool counts as a number, nor what is not finite."""
    allowed = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    plain = tuple(get_origin(a) or a for a in allowed)
    if (isinstance(value, bool) and bool not in plain) or (isinstance(value, float) and not isfinite(value)):
        return False
    return isinstance(value, plain) or (float in plain and isinstance(value, int))


def _tuples(item: Any) -> Any:
    """Nested lists, as JSON knows them, as nested tuples."""
    return tuple(_tuples(part) for part in item) if isinstance(item, list) else item
