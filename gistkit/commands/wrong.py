"""Wrong input of a command, the files that it is to write, and what its help says of defaults."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path


class InputError(Exception):
    """What the user gave is wrong; the text says how, in one line."""

    def __init__(self, text: object) -> None:
        super().__init__(" ".join(str(text).split()))


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help with the defaults that say something: not those of options that are simply left out."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def claim(paths: Iterable[Path | None]) -> None:
    """Make the files that a command will write, with their folders, before its work and not after it. None is no file.

    Raises OSError where one cannot be made, ValueError where it is a folder.
    """
    for path in filter(None, paths):
        if path.is_dir():
            raise ValueError(f"the file to write must not be a folder, got {path}; name a file in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
