"""Plan: what happens to every storage of a step between its two uses. Pure data, JSON both ways."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gistkit.errors import PlanError
from gistkit.formats import item_bytes, mask1_bytes
from gistkit.ir.contract import Contract, Prediction
from gistkit.ir.forms import FORMS, Form
from gistkit.ir.serial import from_json, spelling, to_json

PLACES = ("device", "host", "nowhere")
FORMAT, VERSION = "gistkit.plan", 7
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

    @cached_property
    def form(self) -> Form:
        """The form's row: what it keeps, and how its values come back."""
        return FORMS[self.codec]

    def kept_bytes(self, nbytes: int, dtype: str, density: float | None = None) -> int:
        """Bytes on the device between the uses of a storage of ``nbytes`` of ``dtype``, its mask included; ``density``
        as for :meth:`Form.nbytes`."""
        elements = nbytes // item_bytes(dtype)
        payload = 0 if self.on_host else self.form.nbytes(elements, item_bytes(dtype), density)
        return payload + (mask1_bytes(elements) if self.mask else 0)

    @cached_property
    def on_host(self) -> bool:
        return self.place == "host"

    @cached_property
    def stays(self) -> bool:
        return self.codec == "dense" and self.place == "device"


@dataclass(frozen=True)
class CallChoice:
    """How one covered call runs. ``mask_in_pool``: a ReLU whose backward is the identity, as the map of the max-pool
    behind it carries its mask; and that pool. ``algorithm`` of a convolution: the engines of cuDNN that run it, by
    part; any other name is planner data, and PyTorch picks by itself (:mod:`gistkit.planning.cost.algorithms`).
    ``joint``: a linear layer with PyTorch's own node, which holds the input beside both gradients, as there is room."""

    covered: int
    op: str
    mask_in_pool: bool = False
    algorithm: str = ""
    joint: bool = False


_OPEN, _UNKNOWN = Contract(), Prediction()


@dataclass(frozen=True)
class Budget:
    """A step takes at most ``peak_bytes`` of ``total_bytes``, ``reserved_bytes`` of them for what no plan sees."""

    total_bytes: int
    peak_bytes: int
    reserved_bytes: int

    @property
    def left_bytes(self) -> int:
        return self.total_bytes - self.peak_bytes

    @property
    def room_bytes(self) -> int:
        """The same with what is reserved."""
        return self.left_bytes + self.reserved_bytes


@dataclass(frozen=True)
class Plan:
    """All decisions of one step, by storage and by covered call, with what was predicted of it.

    ``plain_bytes`` and ``kept_bytes`` are what plain PyTorch and the plan keep for backward. ``peak_bytes`` is the most
    that the device holds during forward and backward: parameters, buffers, gradients, inputs, activations, stashes,
    decoded copies, workspace, reserved bytes. ``step_s`` is the seconds of forward and backward, transfers beside the
    computation and the host's share in them; ``prediction`` has plain PyTorch's of both. ``lower_bound_bytes`` is the
    least peak that the allowed moves can reach, ``gap`` how far ``step_s`` may be above the least possible (0.0: proven
    optimal; None: the policy proves nothing), ``sub_batches`` the parts in which the batch is taken. ``fidelity`` is
    ``bitwise``, ``reassociated`` or ``lossy``: the class of the moves really used. ``contract`` says which step the
    plan was made for. ``modules``: names of those that run anew whole in backward, as by ``torch.utils.checkpoint``;
    then PyTorch's own operators run all of the step. ``details`` is what the policy tells of its own search, for
    reports alone.
    """

    policy: str
    fingerprint: str
    decisions: tuple[Decision, ...]
    choices: tuple[CallChoice, ...]
    plain_bytes: int = 0
    kept_bytes: int = 0
    budget_bytes: int | None = None
    peak_bytes: int = 0
    step_s: float = 0.0
    lower_bound_bytes: int = 0
    gap: float | None = None
    sub_batches: int = 1
    fidelity: str = "bitwise"
    hardware: str = ""
    contract: Contract = _OPEN
    prediction: Prediction = _UNKNOWN
    modules: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def budget(self) -> Budget | None:
        """What the plan promises; None for one without a budget."""
        if self.budget_bytes is None:
            return None
        return Budget(self.budget_bytes, self.peak_bytes, self.contract.reserved_bytes)

    @property
    def planned_rows(self) -> int:
        """The most rows of one forward, 0 where that is not known."""
        return -(-self.contract.batch // self.sub_batches)

    def to_json(self) -> str:
        """The plan as JSON text."""
        return to_json(self, format=FORMAT, version=VERSION, digest=self.digest)

    @property
    def digest(self) -> str:
        """Hash of all that the plan says."""
        return hashlib.sha256(spelling(self)).hexdigest()[:16]

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan of :meth:`to_json`'s text. Raises PlanError for any other: place, what was expected, what it has.

        Where the text has a ``digest``, all else must be what that was made of: decisions, figures, contract.
        """
        try:
            plan, header = from_json(Plan, text, {"format": FORMAT, "version": VERSION, "digest": None})
            plan = replace(plan, decisions=tuple(replace(d, recipe=_tuples(d.recipe)) for d in plan.decisions))
        except (ValueError, RecursionError) as error:
            raise PlanError(f"Plan.from_json: text must be that of Plan.to_json; {error}; {REMEDY}") from error
        if header["digest"] not in (None, plan.digest):
            raise PlanError(
                f"Plan.from_json: text must be that of Plan.to_json, got one that was edited after it was planned: its "
                f"digest {header['digest']!r} is not that of the decisions, figures and contract that it holds; plan "
                'again, or remove "digest" to run it at your own risk'
            )
        return plan


def _tuples(item: Any) -> Any:
    """A recipe as nested tuples, which JSON knows as lists."""
    return tuple(map(_tuples, item)) if isinstance(item, list | tuple) else item
