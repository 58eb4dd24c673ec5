"""``gistkit calibrate``: measure the device at hand and write the rates that the planner uses."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table

from gistkit.commands.wrong import HERE, claim, input_errors, write
from gistkit.planning.cost import GIB, Hardware
from gistkit.profiling import calibrate, keep_calibration
from gistkit.report import console, table


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = commands.add_parser("calibrate", help="measure this device for the planner: bandwidth, link, arithmetic")
    parser.add_argument("--device", metavar="DEVICE", default=HERE, help="cpu, cuda or cuda:N")
    text = "write the figures, which --hardware takes, making folders"
    parser.add_argument("--out", metavar="FILE.json", type=Path, help=text)


def run(options: argparse.Namespace) -> int:
    """Measure, write, show; 0."""
    claim(options.out)
    with input_errors(ValueError):
        found = calibrate(options.device)
    kept = keep_calibration(found) if found.async_counts else None
    if options.out:  # the file first: whoever reads the table may close it early
        write(options.out, found.to_json() + "\n")
    console().print(hardware_table(found))
    if kept is not None:
        console().print(f"kept in {kept}: plans for {found.name} on this machine take these figures from now on")
    return 0


def hardware_table(hardware: Hardware) -> Table:
    """The figures of a device as a table, a row a figure."""
    rows = {"memory GiB": f"{hardware.memory_bytes / GIB:.1f}"}
    rows["copy GB/s, read and written"] = f"{hardware.memory_gbps:.1f}"
    if hardware.has_link:
        rows["device to host GB/s"] = f"{hardware.d2h_gbps:.1f}"
        rows["host to device GB/s"] = f"{hardware.h2d_gbps:.1f}"
        rows["both at once GB/s"] = f"{hardware.both_gbps:.1f}"
        rows["kernels beside a transfer"] = f"{hardware.link_interference:+.1%}"
    rows |= {f"{dtype} TFLOP/s": f"{rate / 1e12:.3f}" for dtype, rate in hardware.flops.items()}
    rows["launch us"] = f"{hardware.launch_s * 1e6:.2f}"
    if hardware.host_s or hardware.runtime_host_s:
        times = f"{hardware.host_s * 1e6:.1f}, {hardware.runtime_host_s * 1e6:.1f}"
        rows["host us a task, plain and under gistkit"] = times
        moves = f"{hardware.move_host_factor:.1f}, {hardware.form_host_factor:.1f}"
        rows["host's time of a rerun or transfer, of an encoding, in tasks"] = moves
    rows["codecs, times the H200's passes"] = f"{hardware.codec_slowdown:.2f}"
    shown = table(hardware.name, "figure", ">value")
    for row in rows.items():
        shown.add_row(*row)
    return shown
