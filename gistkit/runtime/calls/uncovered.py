"""The saved-tensor hooks of a region: what becomes of the tensors that ops which gistkit does not cover save."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from gistkit.capture import is_weight
from gistkit.ir import Decision
from gistkit.nn.keep import Alias, Kept
from gistkit.runtime.forward.state import Region
from gistkit.runtime.program.settings import KEEP_DENSE
from gistkit.runtime.stash.stash import Shape


def hooks(region: Region) -> tuple[Callable, Callable]:
    """The region's (pack, unpack) pair."""
    return partial(pack, region), unpack


def pack(region: Region, x: torch.Tensor) -> Kept | Shape:
    """A hold on what an op saves."""
    # a custom Function saves while the region's function mode is on, which would take what is asked here for calls
    with torch._C.DisableTorchFunction():
        return _pack(region, x) if region.tape is None else region.tape.saving(partial(_pack, region), x)


def unpack(kept: Kept | Shape) -> torch.Tensor:
    """The other half of the hook."""
    return kept.dense()


def _pack(region: Region, x: torch.Tensor) -> Kept | Shape:
    # not of a pool's indices, which its backward reads
    if region.unread and x.is_floating_point() and x.layout == torch.strided and not x.is_nested:
        _planned(region, x)  # its turn has come, so that the next one of its shape is not taken for it
        return Shape(x)
    if is_weight(x) or x.layout != torch.strided or x.is_nested:
        return Alias(x)
    decision = _planned(region, x)
    return region.keep(x, decision) if decision is not None or region.settings.lossy is None else region.keep_exact(x)


def _planned(region: Region, x: torch.Tensor) -> Decision | None:
    """The plan's decision for what PyTorch's own op saves; of several that fit, the one whose turn it is."""
    if region.program is None:
        return None
    number = region.calls if region.instead < 0 else region.instead
    key = (number, str(x.dtype).removeprefix("torch."), tuple(x.shape))
    found = region.program.uncovered(key) if region.instead < 0 else region.program.within(key)
    open_choice = KEEP_DENSE if region.strict else None
    if len(found) < 2:
        decision = (found[0] if found else None) or open_choice
        return KEEP_DENSE if decision is not None and decision.storage in region.program.passing else decision
    if x.untyped_storage()._cdata in region.held:
        return KEEP_DENSE
    if region.table.find(x) is not None:
        return None
    if region.strict:
        found = found if region.tape is None else region.tape.meant(found)
        decision = next((d for d in found if d is not None and not _met(region, d.storage)), KEEP_DENSE)
        region.met.add(decision.storage)
        return KEEP_DENSE if decision.storage in region.program.passing else decision
    turn = region.turns[key] = region.turns.get(key, -1) + 1
    return (found[turn] if turn < len(found) else None) or open_choice


def _met(region: Region, storage: int) -> bool:
    """Whether a planned storage has come by already, so that this tensor, which is not known, is another."""
    return storage in region.met or storage in region.aliases or region.table.named(storage) is not None
