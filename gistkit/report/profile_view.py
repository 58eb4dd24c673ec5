"""A profile as data and as tables: classes of memory, kinds of stashed maps, layers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from gistkit.planning.cost import StepTimes
from gistkit.report.tables import SHOWN, mib, milliseconds, rendered, table

TITLES = {
    "weights": "weights and buffers",
    "weight_gradients": "weight gradients",
    "inputs": "inputs not kept",
    "stashed": "stashed feature maps",
    "immediate": "immediately consumed maps",
    "gradient_maps": "gradient maps",
    "workspace": "workspace",
    "relu_pool": "ReLU -> pool",
    "relu_conv": "ReLU -> conv",
    "pool_index": "int64 indices of pools",
    "other": "other",
}


@dataclass(frozen=True)
class LayerProfile:
    """One layer of the forward (vDNN, Fig. 5 and 6).

    Bytes of its input and output feature maps (an in-place layer's are the same), of its weights and of its forward's
    workspace; seconds of forward and backward. ``reuse_s`` is the reuse distance of its input: from the end of its
    forward to the start of its backward; None where it has no backward.
    """

    module: str
    kind: str
    op: str
    x_bytes: int
    y_bytes: int
    workspace_bytes: int
    weight_bytes: int
    forward_s: float
    backward_s: float
    reuse_s: float | None


@dataclass(frozen=True)
class Profile:
    """A step of plain PyTorch; ``str()`` gives tables, :meth:`to_json` all of it.

    By class (:mod:`gistkit.api.profiling`): ``total_bytes``, every storage once; ``most_bytes``, the most of the class
    at one moment; ``peak_class_bytes``, at the moment of the step's peak; ``memory_bytes``, by task, for pictures.
    ``stashed_bytes`` are the stashed ones by what makes and reads them. Workspace is reused, so its total is its most.
    ``backward_task``: backward's first. ``times``: the measured ones behind all seconds, None where predicted.
    """

    model: str
    hardware: str
    batch: int
    peak_bytes: int
    peak_task: int
    step_s: float
    backward_task: int
    total_bytes: dict[str, int]
    most_bytes: dict[str, int]
    peak_class_bytes: dict[str, int]
    stashed_bytes: dict[str, int]
    memory_bytes: dict[str, tuple[int, ...]]
    layers: tuple[LayerProfile, ...]
    times: StepTimes | None = None

    def to_json(self) -> str:
        """The profile as JSON text."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        return rendered(profile_tables(self))


def profile_tables(profile: Profile) -> list[Table]:
    """Memory by class, stashed maps by kind, layers."""
    return [_classes(profile), _stashes(profile), _layers(profile)]


def _classes(profile: Profile) -> Table:
    named = f"{profile.model}, batch {profile.batch}" if profile.model else f"batch {profile.batch}"
    columns = ("class", ">total MiB", ">most at once", ">at peak", ">share")
    caption = f"peak {mib(profile.peak_bytes)} MiB, step {milliseconds(profile.step_s)} ms"
    shown = table(f"plain PyTorch: {named}, {profile.hardware}", *columns, caption=caption)
    for name, total in profile.total_bytes.items():
        at_peak = profile.peak_class_bytes[name]
        share = f"{at_peak / max(1, profile.peak_bytes):.1%}"
        shown.add_row(TITLES[name], mib(total), mib(profile.most_bytes[name]), mib(at_peak), share)
    return shown


def _stashes(profile: Profile) -> Table:
    shown = table("stashed feature maps, by maker and reader", "kind", ">MiB", ">share")
    total = max(1, sum(profile.stashed_bytes.values()))
    for name, nbytes in profile.stashed_bytes.items():
        shown.add_row(TITLES[name], mib(nbytes), f"{nbytes / total:.1%}")
    return shown


def told(times: StepTimes) -> str:
    """Where times come from, in a line; in another one what the memory format costs."""
    rows, of = f" of {times.rows} rows, scaled to {times.batch}", " of the batch"
    if times.rows == times.batch:
        rows = of = ""
    took, total = milliseconds(times.step_s), milliseconds(times.total_s)
    remedy = f"\n{times.workspace_remedy}" if times.workspace_remedy else ""
    return f"measured on {times.device}: a step{rows} took {took} ms, all tasks{of} add up to {total} ms{remedy}"


def _layers(profile: Profile) -> Table:
    columns = ("layer", ">X", ">Y", ">work", ">weights", ">fwd", ">bwd", ">reuse")
    title = "layers: MiB of the forward, ms, reuse distance of the input"
    caption = "work: workspace; reuse: ms from the end of a layer's forward to the start of its backward"
    caption += "" if profile.times is None else f"; {told(profile.times)}"
    shown = table(title, *columns, caption=caption, box=SIMPLE_HEAD, pad_edge=False)
    for layer in profile.layers[:SHOWN]:
        sizes = (layer.x_bytes, layer.y_bytes, layer.workspace_bytes, layer.weight_bytes)
        reuse = "-" if layer.reuse_s is None else milliseconds(layer.reuse_s)
        times = (milliseconds(layer.forward_s), milliseconds(layer.backward_s), reuse)
        shown.add_row(layer.module or layer.op, *map(mib, sizes), *times)
    if rest := profile.layers[SHOWN:]:
        shown.add_row(f"{len(rest)} more: --json")
    return shown
