"""What a plan was made for, and what was predicted of it. Pure data, part of :class:`gistkit.ir.Plan`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gistkit.ir.saved_graph import StateTensor


@dataclass(frozen=True)
class PlannedCall:
    """A call of the planned forward of which backward keeps something. ``dtype`` and ``shape`` are those of its first
    result, '' and () without one. ``geometry`` holds the arguments that change what a covered call keeps."""

    op: str
    module: str
    dtype: str
    shape: tuple[int, ...]
    geometry: dict[str, Any]


@dataclass(frozen=True)
class Contract:
    """The step that a plan was made for, as far as its fingerprint leaves it open.

    A fingerprint knows no sizes, so that a last, smaller batch runs under the plan of the others. A budget relies on
    more: ``batch`` rows, ``training`` mode, the ``inputs``, parameters and buffers (``state``), the ``calls``, at most
    ``storage_bytes`` in every storage of one sub-batch and ``saved_bytes`` in all of plain PyTorch's together. The
    calls and ``autocast``, in words, also tell what differs where the fingerprints do.

    ``densities``: by storage the share of non-zero elements that its sparse payload was counted with. ``has_link``: to
    a host. ``task_calls``: by task the covered call that it belongs to (-1: none), from ``backward_from`` on those of
    backward; empty where nothing goes to the host. ``fidelity``, ``lossy``, ``reserved_bytes`` and
    ``per_sub_batch_norm`` are what the caller asked for. Plans that :func:`gistkit.plan` has not made leave most open.
    """

    batch: int = 0
    training: bool = True
    inputs: tuple[StateTensor, ...] | None = None
    state: tuple[StateTensor, ...] = ()
    calls: tuple[PlannedCall, ...] = ()
    storage_bytes: tuple[int, ...] = ()
    saved_bytes: int = 0
    autocast: str = ""
    densities: dict[int, float] = field(default_factory=dict)
    has_link: bool = True
    task_calls: tuple[int, ...] = ()
    backward_from: int = 0
    fidelity: str = "bitwise"
    lossy: str | None = None
    reserved_bytes: int = 0
    per_sub_batch_norm: bool = False

    @property
    def known(self) -> bool:
        """Whether the step was recorded."""
        return bool(self.calls or self.state or self.storage_bytes)


@dataclass(frozen=True)
class Measured:
    """The measured step that a plan's seconds come from (:class:`gistkit.StepTimes`)."""

    device: str
    batch: int
    rows: int
    step_s: float
    fingerprint: str


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a step besides ``Plan.peak_bytes`` and ``Plan.step_s``.

    ``plain_peak_bytes`` and ``plain_step_s`` are plain PyTorch's. ``rates`` says where the rates of ``Plan.hardware``
    are from: a preset and its source, a calibration and its date, a file. ``measured``: the seconds come from measured
    times. ``not_compared``: policies that may be faster, for which there was no time.
    """

    plain_peak_bytes: int = 0
    plain_step_s: float = 0.0
    rates: str = ""
    measured: Measured | None = None
    not_compared: tuple[str, ...] = ()
