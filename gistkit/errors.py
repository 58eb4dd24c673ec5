"""Errors of gistkit: what failed, what was demanded, what was given, and what to do about it."""


class GistError(RuntimeError):
    """Base class of every error in capturing, planning or running; arguments raise ValueError or TypeError."""


class CompressError(GistError):
    """A model cannot be compressed or restored in the state it is in (for example: compressed twice)."""


class CaptureError(GistError):
    """The saved tensors of a step could not be recorded."""


class PlanMismatchError(GistError):
    """The step that runs is not the step that was planned; says what was expected, what came, what to do."""

    def __init__(self, expected: str, got: str, remedy: str) -> None:
        super().__init__(f"the step differs from its plan: expected {expected}, got {got}; {remedy}")
        self.expected, self.got, self.remedy = expected, got, remedy


class DataError(GistError):
    """A data set on disk cannot be read: names the path, what was expected there and what to do."""


class KernelError(GistError):
    """A kernel cannot run on the device at hand."""
