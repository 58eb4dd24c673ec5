"""Errors of gistkit: what failed, what was demanded, what was given, and what to do about it."""

from __future__ import annotations

import functools
import typing

_SHOWN = 60
F = typing.TypeVar("F", bound=typing.Callable)


def quoted(value: object) -> str:
    """A value as an error shows it: its repr, the middle left out where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an int of thousands of digits
        return f"{type(value).__name__} too long to be shown"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 15]}...{text[-12:]}"


def renamed(**names: str) -> typing.Callable[[F], F]:
    """Decorates a function whose keywords have other names now: a call by an old one raises TypeError, which says what
    to write instead."""

    def decorated(function: F) -> F:
        @functools.wraps(function)
        def checked(*args: object, **kwargs: object) -> object:
            for old in names.keys() & kwargs.keys():
                raise TypeError(f"{function.__name__}: {old}= is called {names[old]} now; write {names[old]}")
            return function(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorated


def printable(text: str) -> str:
    """A text with everything that a terminal would obey, or that cannot be encoded, as an escape such as ``\\x1b``."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class GistError(RuntimeError):
    """Base class of every error in capturing, planning or running; arguments raise ValueError or TypeError."""


class CompressError(GistError):
    """A model cannot be compressed or restored in the state it is in (for example: compressed twice)."""


class CompileError(GistError):
    """A model cannot be compiled with compression: names what is missing or contradicts, and what to do."""


class CaptureError(GistError):
    """The saved tensors of a step could not be recorded."""


class PlanMismatchError(GistError):
    """The step that runs is not the step that was planned; says what was expected, what came, what to do."""

    def __init__(self, expected: str, got: str, remedy: str) -> None:
        super().__init__(f"the step differs from its plan: expected {expected}, got {got}; {remedy}")
        self.expected, self.got, self.remedy = expected, got, remedy


class PlanError(GistError, ValueError):
    """A plan contradicts itself or the step that it is for: names the storage, what was decided and what to do."""


class BudgetError(GistError):
    """No allowed plan fits the budget; says the budget, the least one of each fidelity class, what to do.

    ``least_bytes`` maps ``bitwise``, ``reassociated``, ``lossy`` to the least peak that moves of the class can reach,
    for the classes that were looked at.
    """

    def __init__(self, budget_bytes: int, least_bytes: dict[str, int], remedy: str) -> None:
        least = ", ".join(f"{name} {value} bytes ({value / 2**20:.1f} MiB)" for name, value in least_bytes.items())
        super().__init__(
            f"the budget must be at least what the step needs, by the class of moves: {least}; "
            f"got {budget_bytes} bytes ({budget_bytes / 2**20:.1f} MiB): {remedy}"
        )
        self.budget_bytes, self.least_bytes, self.remedy = budget_bytes, dict(least_bytes), remedy


class BudgetWarning(UserWarning):
    """A step is not what its budget was planned for, and goes on. It has fewer zeros: names the larger storages with
    their bytes and what went to the host for that, or says by how much the budget may be exceeded. Or it holds an
    earlier forward or a retained graph besides, or its few rows take another way through the model, which runs as plain
    PyTorch: says by how much."""


class OffloadError(GistError):
    """A tensor cannot be sent to the host or fetched from there: says what was demanded of it and what it is now."""


class HostMemoryError(OffloadError):
    """The host has too little memory that can be pinned: says how many bytes were wanted, and why there are none.

    ``wanted_bytes``: what was to be pinned.
    """

    def __init__(self, wanted_bytes: int, why: str) -> None:
        super().__init__(
            f"offload: {wanted_bytes} bytes ({wanted_bytes / 2**30:.2f} GiB) of host memory must be pinned; {why}. "
            "Free host memory, or plan with less on the host (policy gist or optimal without a link)"
        )
        self.wanted_bytes = wanted_bytes


class MeasureError(GistError):
    """The seconds of a step cannot be measured here: says what does not fit or does not run, and what to do."""


class DataError(GistError):
    """A data set on disk cannot be read: names the path, what was expected there and what to do."""


class ModelError(GistError):
    """A network is none that can be trained on labelled images: says what its forward must return and what it did."""
