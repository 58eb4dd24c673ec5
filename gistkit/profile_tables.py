"""The tables of a profile: classes of memory, kinds of stashed maps, layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from gistkit.tables import mib, milliseconds, rendered

if TYPE_CHECKING:
    from gistkit.profiling import Profile

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


def profile_text(profile: Profile) -> str:
    """All tables as text."""
    return rendered(profile_tables(profile))


def profile_tables(profile: Profile) -> list[Table]:
    """Memory by class, stashed maps by kind, layers."""
    return [_classes(profile), _stashes(profile), _layers(profile)]


def _classes(profile: Profile) -> Table:
    named = f"{profile.model}, batch {profile.batch}" if profile.model else f"batch {profile.batch}"
    table = Table(
        title=f"memory of a step of plain PyTorch: {named}, {profile.hardware}",
        caption=f"peak {mib(profile.peak_bytes)} MiB, step {milliseconds(profile.step_s)} ms",
    )
    table.add_column("class")
    for name in ("total MiB", "most at once", "at the peak", "share of peak"):
        table.add_column(name, justify="right")
    for name, total in profile.total_bytes.items():
        at_peak = profile.peak_class_bytes[name]
        share = f"{at_peak / max(1, profile.peak_bytes):.1%}"
        table.add_row(TITLES[name], mib(total), mib(profile.most_bytes[name]), mib(at_peak), share)
    return table


def _stashes(profile: Profile) -> Table:
    table = Table(title="stashed feature maps, by what makes and reads them")
    table.add_column("kind")
    table.add_column("MiB", justify="right")
    table.add_column("share", justify="right")
    total = max(1, sum(profile.stashed_bytes.values()))
    for name, nbytes in profile.stashed_bytes.items():
        table.add_row(TITLES[name], mib(nbytes), f"{nbytes / total:.1%}")
    return table


def _layers(profile: Profile) -> Table:
    table = Table(
        title="layers: memory of the forward, time, reuse distance of the input",
        caption="MiB and ms; reuse distance: from the end of a layer's forward to the start of its backward",
    )
    table.add_column("layer")
    table.add_column("kind")
    for name in ("X", "Y", "workspace", "weights", "forward", "backward", "reuse"):
        table.add_column(name, justify="right", no_wrap=True)
    for layer in profile.layers[:SHOWN]:
        reuse = "-" if layer.reuse_s is None else milliseconds(layer.reuse_s)
        sizes = (layer.x_bytes, layer.y_bytes, layer.workspace_bytes, layer.weight_bytes)
        times = (milliseconds(layer.forward_s), milliseconds(layer.backward_s), reuse)
        table.add_row(layer.module or layer.op, layer.kind, *map(mib, sizes), *times)
    rest = profile.layers[SHOWN:]
    if rest:
        table.add_row(f"{len(rest)} more", "", *[""] * 6, "--json")
    return table


__all__ = ["TITLES", "profile_tables", "profile_text"]
