"""The command ``gistkit``, whose commands are a file each in ``gistkit.commands``.

Exit status: 0 where all went well; 1 where the lossless loss differs from the plain one, no plan fits the budget, or an
encoding of the benchmark gives wrong bits; 2 for wrong input and what else goes wrong, with one line on the standard
error; 130 after Ctrl-C; 141 where the reader of the tables went away.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from gistkit.commands import Parser, accuracy, bench, calibrate, plan, profile, status_of, train
from gistkit.version import VERSION

COMMANDS = {m.__name__.rpartition(".")[2]: m for m in (profile, plan, train, accuracy, bench, calibrate)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (the process's own by default); returns the exit status."""
    options = _parser().parse_args(arguments)
    return status_of(lambda: COMMANDS[options.command].run(options))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="gistkit", description="Train networks in a fraction of the activation memory.")
    parser.add_argument("--version", action="version", version=f"gistkit {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS.values():
        command.add(commands)
    return parser
