"""What the commands share: errors and exit statuses, files that they write, defaults in their help, progress."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gistkit.errors import GistError, printable
from gistkit.runtime import does_not_fit

STDOUT = 1
_DEVICES = (Path("/dev"), Path("/dev/fd"))
HERE = "cuda" if torch.cuda.is_available() else "cpu"
"""The device that a command takes where none is named."""
WRONG, INTERRUPTED, CUT_OFF = 2, 130, 141
"""Statuses; the latter two are those that shells have for what SIGINT and SIGPIPE end."""


class InputError(Exception):
    """What the user gave is wrong; the text says how, in one line."""

    def __init__(self, text: object) -> None:
        super().__init__(printable(" ".join(str(text).split())))


@contextmanager
def input_errors(kinds: Any = (ValueError, TypeError)) -> Iterator[None]:
    """Raise InputError for errors of these kinds."""
    try:
        yield
    except kinds as error:
        raise InputError(error) from error


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help with the defaults that say something: not those of options that are simply left out."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser whose help has the defaults, and whose errors show no raw control characters of the arguments."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_HelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def progress_bars() -> Progress:
    """Bars on the standard error, with the time gone and the time to come."""
    bars = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *bars, console=Console(stderr=True))


def status_of(command: Callable[[], int]) -> int:
    """Run a command. What is wrong with its input, its files or the machine's memory is one line on the standard error
    and status 2; Ctrl-C is status 130, and a reader of its output that goes away (``| head``) 141, without a word."""
    # Fake tensors log a traceback for what they refuse, which the error says in a line.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        status = command()
        print(end="", flush=True)  # what cannot be written is known now, not as the interpreter ends
        return status
    except KeyboardInterrupt:
        print("gistkit: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_unwritable_output()
        return CUT_OFF
    except (InputError, GistError, OSError) as error:
        _drop_unwritable_output()
        text = InputError(error)
    except (MemoryError, RuntimeError) as error:
        if not does_not_fit(error):
            raise
        text = InputError(f"too little memory ({str(error)[:200]}); take a smaller batch or smaller images")
    print(f"gistkit: error: {text}", file=sys.stderr)
    return WRONG


def _drop_unwritable_output() -> None:
    """Where the standard output takes no more, drop what it still holds: the interpreter would try again as it ends."""
    try:
        print(end="", flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, STDOUT)
        os.close(nowhere)


def claim(*paths: Path | None, plot: Path | None = None) -> None:
    """Make the folders of the files that a command will write, and see that these can be made, before its work. None is
    no file. What is not there yet is not there afterwards: a command that is cut off leaves no empty file. Raises
    InputError where one cannot be made, is a folder, or is a plot that matplotlib cannot draw."""
    if plot is not None:
        _check_plot(plot)
    for path in filter(None, (*paths, plot)):
        with _named_errors(path):
            if path.is_dir():
                raise InputError(f"the file to write must not be a folder, got {path}; name a file in it")
            path.parent.mkdir(parents=True, exist_ok=True)
            for file in (path, _beside(path)):
                known = file.exists()
                file.touch()
                if not known:
                    file.unlink()


def _check_plot(path: Path) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError("plotting needs matplotlib; pip install 'gistkit[plot]'") from error
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InputError(f"plot file must end in .png, .svg or .pdf, got {path.name!r}; name one that does")


def _beside(path: Path) -> Path:
    """The file to write in the place of ``path``, in the same folder; ``path`` itself where that is no regular file, or
    is reached through ``/dev``, as the standard output is."""
    if path.absolute().parent in _DEVICES or (path.exists() and not path.is_file()):
        return path
    return Path(os.path.realpath(path)).with_name(f".gistkit-{os.getpid()}{path.suffix}")


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Gives the file to write, which takes the name of ``path`` once it is whole: ``path`` has all or is as it was. A
    device or a pipe is written as it is. Raises InputError, naming ``path``, where writing fails."""
    with _named_errors(path):
        beside = _beside(path)
        if beside == path:
            yield path
            return
        try:
            yield beside
            if path.exists():
                shutil.copymode(path, beside)
            os.replace(beside, os.path.realpath(path))
        finally:
            beside.unlink(missing_ok=True)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Raise InputError, naming the file, where writing it fails."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}; name another file") from error


def write(path: Path, text: str) -> None:
    """Write a file, whole or not at all. Raises InputError where that cannot be done."""
    with writing(path) as file:
        file.write_text(text, encoding="utf-8")
