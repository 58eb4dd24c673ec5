"""``gistkit profile MODEL``: where the memory and the time of a training step go."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from gistkit.api import costs_of, profile_graph
from gistkit.commands.images import add_images, image_step, prepare
from gistkit.commands.wrong import write, writing
from gistkit.report import console, plot_profile, profile_tables


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "profile", help="where the memory and the time of a training step go, by class and by layer"
    )
    add_images(parser)
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the memory over one step, making folders")


def run(options: argparse.Namespace) -> int:
    """Capture, write, show; 0."""
    device = prepare(options)
    with Console(stderr=True).status("measuring a step" if options.measure else "recording a step"):
        graph, times = image_step(options, device)
    found = profile_graph(graph, costs_of(graph, device, times), options.model, times)
    if options.json:  # files first: whoever reads the tables may close them early
        write(options.json, found.to_json() + "\n")
    if options.plot:
        with writing(options.plot) as file:
            plot_profile(found, file)
    shown = console()
    for table in profile_tables(found):
        shown.print(table)
    return 0
