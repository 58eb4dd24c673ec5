"""The saved-tensor hooks of a forward: what becomes of the tensors that PyTorch's own ops save.

Hooks are set only around calls that save something which is kept in another form, or around the whole forward where a
custom autograd Function does, which no function mode sees.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gistkit.capture import is_weight
from gistkit.ir import Decision
from gistkit.nn.keep import PACKED, Kept, SavedAsIs
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.program.program import KEEP_DENSE
from gistkit.runtime.stash.stash import DENSE_VALUES, Shape

top_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]
_push = torch._C._autograd._push_saved_tensors_default_hooks  # type: ignore[attr-defined]
_pop = torch._C._autograd._pop_saved_tensors_default_hooks  # type: ignore[attr-defined]


def catches(state: ForwardState) -> bool:
    """Whether PyTorch's own op, which runs now, saves something that is to be caught."""
    program = state.program
    if program is None:
        return True
    if state.instead >= 0:
        return state.instead in program.caught_within
    number = -1 if state.tape is None else state.tape.running
    return state.calls in program.caught and (number < 0 or number in program.catching)


class caught:
    """What is saved in this block goes to the forward's hooks; ``packs(state, x)`` gives a hold on x."""

    __slots__ = ("_pack",)

    def __init__(self, state: ForwardState, packs: Callable[[ForwardState, torch.Tensor], Any] | None = None) -> None:
        self._pack = partial(packs or pack, state)

    def __enter__(self) -> None:
        _push(self._pack, DENSE_VALUES)

    def __exit__(self, *_: Any) -> None:
        _pop()


def pack_known(state: ForwardState, x: torch.Tensor) -> Any:
    """A hold on what an op saves: the stash of its storage as it is now, else the tensor itself."""
    return state.table.hold(x) or SavedAsIs(x)


def hold_saved(state: ForwardState, node: Any, field: str) -> None:
    """Have a node hold the stash, if there is one, of what it saved as ``field`` (autograd's name without _saved_)."""
    try:
        x = getattr(node, f"_saved_{field}")
    except (AttributeError, RuntimeError):  # saved otherwise than in the capture, or written to since
        return
    known = state.table.hold(x) if isinstance(x, torch.Tensor) else None
    if known is not None:
        getattr(node, f"_raw_saved_{field}").register_hooks(PACKED, known.dense)


class without_hooks:
    """None of the forward's own hooks in this block."""

    __slots__ = ("_hooks",)

    def __init__(self, state: ForwardState) -> None:
        self._hooks = top_hooks(False) if state.hooked else None

    def __enter__(self) -> None:
        if self._hooks is not None:
            _pop()

    def __exit__(self, *_: Any) -> None:
        if self._hooks is not None:
            _push(*self._hooks)


def pack(state: ForwardState, x: torch.Tensor) -> Kept | Shape:
    """A hold on what an op saves."""
    if not state.hooked:
        return _pack(state, x) if state.tape is None else state.tape.saving(_pack, state, x)
    # a custom Function saves while the forward's function mode is on, which would take what is asked here for calls
    with torch._C.DisableTorchFunction():
        return _pack(state, x) if state.tape is None else state.tape.saving(_pack, state, x)


def _pack(state: ForwardState, x: torch.Tensor) -> Kept | Shape:
    # not of a pool's indices, which its backward reads
    if state.unread and x.is_floating_point() and x.layout == torch.strided and not x.is_nested:
        _planned(state, x)  # its turn has come, so that the next one of its shape is not taken for it
        return Shape(x)
    if x.layout != torch.strided or x.is_nested or is_weight(x):
        return SavedAsIs(x)
    decision = _planned(state, x)
    if decision is not None and decision.storage in state.program.settled and not state.probing:  # type: ignore[union-attr]
        if state.table.find(x) is None:  # one of several is noted, so that the next save of it is known again
            return state.alias(x, decision) if decision.storage in state.met else SavedAsIs(x)
    return state.keep(x, decision) if decision is not None or state.settings.lossy is None else state.keep_exact(x)


def _planned(state: ForwardState, x: torch.Tensor) -> Decision | None:
    """The plan's decision for what PyTorch's own op saves; of several that fit, the one whose turn it is."""
    program = state.program
    if program is None:
        return None
    number = state.calls if state.instead < 0 else state.instead
    gaps = program.gaps if state.instead < 0 else program.within
    key = number, x.dtype, x.shape
    found = gaps[key] if key in gaps else ()
    open_choice = KEEP_DENSE if state.strict else None
    if len(found) < 2:
        decision = (found[0] if found else None) or open_choice
    elif x.untyped_storage()._cdata in state.dense:
        return KEEP_DENSE
    elif state.table.find(x) is not None:
        return None
    else:
        if state.strict and state.tape is not None:
            found = state.tape.meant(found)
        # a planned storage that has come by already is not this one, which is not known
        gone = {*state.met, *state.aliases}
        new = (d for d in found if d and d.storage not in gone and state.table.named(d.storage) is None)
        decision = next(new, open_choice)
        if decision is not None:
            state.met.add(decision.storage)
    return KEEP_DENSE if decision is not None and decision.storage in program.passing else decision
