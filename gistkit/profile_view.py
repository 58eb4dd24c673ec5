"""A profile as data and as tables: classes of memory, kinds of stashed maps, layers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from gistkit.tables import mib, milliseconds, rendered

SHOWN = 40
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

    By class (:mod:`gistkit.profiling`): ``total_bytes``, every storage once; ``most_bytes``, the most of the class at
    one moment; ``peak_class_bytes``, at the moment of the step's peak; ``memory_bytes``, by task, for pictures.
    ``stashed_bytes`` are the stashed ones by what makes and reads them. Workspace is reused, so its total is its most.
    ``backward_task`` is the first task of the backward.
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

    def to_json(self) -> str:
        """The profile as JSON text."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        return profile_text(self)


_SHORT = {"workspace": "work", "forward": "fwd", "backward": "bwd"}


def profile_text(profile: Profile) -> str:
    """All tables as text."""
    return rendered(profile_tables(profile))


def profile_tables(profile: Profile, wide: bool = True) -> list[Table]:
    """Memory by class, stashed maps by kind, layers; not ``wide``: for 80 columns, without the layers' kinds."""
    return [_classes(profile), _stashes(profile), _layers(profile, wide)]


def _classes(profile: Profile) -> Table:
    named = f"{profile.model}, batch {profile.batch}" if profile.model else f"batch {profile.batch}"
    table = Table(
        title=f"plain PyTorch: {named}, {profile.hardware}",
        caption=f"peak {mib(profile.peak_bytes)} MiB, step {milliseconds(profile.step_s)} ms",
    )
    table.add_column("class", no_wrap=True)
    for name in ("total MiB", "most at once", "at peak", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, total in profile.total_bytes.items():
        at_peak = profile.peak_class_bytes[name]
        share = f"{at_peak / max(1, profile.peak_bytes):.1%}"
        table.add_row(TITLES[name], mib(total), mib(profile.most_bytes[name]), mib(at_peak), share)
    return table


def _stashes(profile: Profile) -> Table:
    table = Table(title="stashed feature maps, by maker and reader")
    table.add_column("kind", no_wrap=True)
    table.add_column("MiB", justify="right")
    table.add_column("share", justify="right")
    total = max(1, sum(profile.stashed_bytes.values()))
    for name, nbytes in profile.stashed_bytes.items():
        table.add_row(TITLES[name], mib(nbytes), f"{nbytes / total:.1%}")
    return table


def _layers(profile: Profile, wide: bool) -> Table:
    table = Table(
        title="layers: MiB of the forward, ms, reuse distance of the input",
        caption="reuse: ms from the end of a layer's forward to the start of its backward",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("layer", no_wrap=True)
    if wide:
        table.add_column("kind", no_wrap=True)
    for name in ("X", "Y", "workspace", "weights", "forward", "backward", "reuse"):
        shown = name if wide else _SHORT.get(name, name)
        table.add_column(shown, justify="right", no_wrap=True)
    for layer in profile.layers[:SHOWN]:
        kind = (layer.kind,) if wide else ()
        reuse = "-" if layer.reuse_s is None else milliseconds(layer.reuse_s)
        sizes = (layer.x_bytes, layer.y_bytes, layer.workspace_bytes, layer.weight_bytes)
        times = (milliseconds(layer.forward_s), milliseconds(layer.backward_s), reuse)
        table.add_row(layer.module or layer.op, *kind, *map(mib, sizes), *times)
    rest = profile.layers[SHOWN:]
    if rest:
        table.add_row(f"{len(rest)} more: --json")
    return table


__all__ = ["TITLES", "LayerProfile", "Profile", "profile_tables", "profile_text"]
