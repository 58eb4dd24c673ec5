"""The context manager beneath compress: gistkit's ops and hooks around any region of code, without a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gistkit.capture import hooks_are_active
from gistkit.errors import CompressError
from gistkit.planning.policies import check_lossy
from gistkit.runtime.calls.interpose import interposed
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.program.settings import Settings
from gistkit.runtime.program.stats import StepStats, observe
from gistkit.runtime.sparse_sizes.exact import ExactPacker


class Saved:
    """What a ``gistkit.saving`` block kept; ``stats`` is there when the block has ended."""

    def __init__(self) -> None:
        self.stats: StepStats | None = None


@contextmanager
def saving(lossy: str | None = None) -> Iterator[Saved]:
    """Keep the saved tensors of the forward code in this block encoded, each decided from the tensor alone.

    For code that is no single module. Without a plan nothing is known of later readers, so no ReLU runs in place, none
    gives its mask to a pool, and nothing is rebuilt; results are bit-exact unless ``lossy`` names a format (see
    :func:`gistkit.compress`): then what convolutions, linear layers and batch norms read is rounded. Backward may run
    inside or outside. Raises ValueError for an unknown format, CompressError inside another such block or where other
    saved-tensor hooks are active.
    """
    check_lossy(lossy)
    if hooks_are_active():
        raise CompressError(
            "saving: other saved-tensor hooks are active here and only the innermost pair applies; "
            "leave that block first"
        )
    state, saved = ForwardState(Settings(lossy), ExactPacker()), Saved()
    try:
        with interposed(state):
            yield saved
        state.finish()
        saved.stats = observe(state).stats()
    finally:
        state.clear()
