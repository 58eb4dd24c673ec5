"""The command ``gistkit``: ``profile``, ``plan``, ``train``, ``calibrate``; one file a command in ``gistkit.commands``.

Exit status: 0 where all went well; 1 where the lossless loss differs from the plain one, or no plan fits the budget; 2
for wrong input, with one line on the standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gistkit.commands import calibrate, plan, profile, train
from gistkit.commands.wrong import InputError

COMMANDS = {"profile": profile, "plan": plan, "train": train, "calibrate": calibrate}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (the process's own by default); returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return COMMANDS[options.command].run(options)
    except InputError as error:
        print(f"gistkit: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gistkit", description="Train networks in a fraction of the activation memory."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS.values():
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
