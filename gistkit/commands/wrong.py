"""Wrong input of a command, the files that it is to write, and what its help says of defaults."""

from __future__ import annotations

import argparse
import os
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
    """Make the folders of the files that a command will write, and see that these can be made, before its work and not
    after it. None is no file. What is not there yet is not there afterwards either: a command that is cut off leaves no
    empty file.

    Raises OSError where one cannot be made, ValueError where it is a folder.
    """
    for path in filter(None, paths):
        if path.is_dir():
            raise ValueError(f"the file to write must not be a folder, got {path}; name a file in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        known = path.exists()
        path.touch()
        if not known:
            path.unlink()


def write(path: Path, text: str) -> None:
    """Write a whole file or none: to one beside it, which then takes its name. What is no plain file (``/dev/stdout``)
    is written to as it is. Raises OSError where that cannot be done."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
