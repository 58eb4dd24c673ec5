"""What a forward of some rows takes, and whether its rows depend on each other, told without memory and arithmetic.

A copy of the model runs on fake tensors. Of every tensor it is known along which dimension its rows lie, outermost in
it. A few kinds of operators keep rows apart for certain: what goes element by element, what leaves that dimension as it
is, and products with what has no rows. With any other operator, or another way of using these, nothing is proven. Used
where a budget has no room for two rows (:mod:`gistkit.runtime.step.norm_arithmetic`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from gistkit.capture import no_autocast_cache, tensors_in, untouched_random_states
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.step.deterministic_forward import GivenStatistics, tensors_of
from gistkit.runtime.step.row_preserving_ops import kept_along

aten = torch.ops.aten
ANY = -1
"""The rows of constants and random numbers: along any dimension, or none."""
CONSTANT = ("empty", "zeros", "ones", "full", "scalar_tensor", "bernoulli", "rand", "uniform", "normal")
UNTAGGED = (
    "hardswish", "hardswish_", "hardtanh_", "log_sigmoid_forward", "rsub", "masked_fill", "masked_fill_", "copy_",
    "_prelu_kernel",
)  # fmt: skip
"""Element by element like those that PyTorch tags so."""
FACTORIES = ("empty", "zeros", "ones", "full", "rand", "new_")
"""Which read nothing of their operands but the shape."""


class Unproven(Exception):
    """An operator may couple rows; says which."""


@dataclass(frozen=True)
class Dry:
    """A forward on fake tensors: the most bytes that it made, what it gave, which operator may couple rows (empty: none
    does)."""

    peak_bytes: int
    out: Any
    unproven: str
    numbers: tuple
    """Of every operator that goes element by element: those that depend on the number of rows make all of it do so."""


def dry_run(model: torch.nn.Module, inputs: tuple[tuple, dict], rows: int, statistics: GivenStatistics) -> Dry:
    """The forward of ``inputs`` of ``rows`` rows, real ones, without memory. Raises what the forward raises on fake
    tensors."""
    mode = FakeTensorMode()
    twin = copy.deepcopy(model, {id(t): mode.from_tensor(t) for t, _ in tensors_of(model)})
    # detached: a tensor that is no leaf is asked for its gradient, which warns
    fake = tree_map(lambda t: mode.from_tensor(t.detach()) if isinstance(t, torch.Tensor) else t, inputs)
    watch = RowWatch(rows, tensors_in(list(fake)))
    with untouched_random_states(), no_autocast_cache(), torch.no_grad(), mode:
        with LiveBytes(timeline=False) as live, watch, statistics:
            out = twin(*fake[0], **fake[1])
    apart = all(watch.of(t) == 0 for t in tensors_in(out))
    return Dry(
        live.peak_bytes, out, watch.unproven or ("" if apart else "what the model returns"), tuple(watch.numbers)
    )


class RowWatch(TorchDispatchMode):
    """Follows the dimension of the rows from ``inputs`` on; ``unproven`` is the first operator that may couple them."""

    def __init__(self, rows: int, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._rows, self.unproven = rows, ""
        self.numbers: list[tuple] = []
        self._along = WeakIdKeyDictionary()
        for t in inputs:
            if t.dim():
                self._along[t] = 0

    def of(self, t: Any) -> int | None:
        """The dimension of a tensor's rows; None where it has none."""
        return self._along.get(t) if isinstance(t, torch.Tensor) else None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if torch.Tag.pointwise in func.tags or name in UNTAGGED or "full" in name:
            numbers = [v for v in (*args, *(kwargs or {}).values()) if isinstance(v, int | float)]
            self.numbers.append((name, *numbers))
        if not self.unproven:
            try:
                along = self._found(func, args, kwargs or {}, out)
            except Exception as error:  # also a rule that meets arguments which it does not know
                self.unproven = str(error) if isinstance(error, Unproven) else func._schema.name
                return out
            if along is not None:
                for t in tensors_in(out):
                    self._along[t] = along
        return out

    def _found(self, func: Any, args: tuple, kwargs: dict, out: Any) -> int | None:
        """Where the rows of a call's results lie."""
        op, name = func.overloadpacket, func._schema.name.split("::")[1]
        given = list(tensors_in([list(args), kwargs]))
        if next(tensors_in(out), None) is None:
            return None
        having = [t for t in given if self.of(t) is not None]
        if all(self.of(t) == ANY for t in having):
            made = op in (aten.expand, aten.repeat) or any(part in name for part in CONSTANT)
            return ANY if having or made else None
        if name.startswith(FACTORIES):
            return ANY
        if torch.Tag.pointwise in func.tags or name in UNTAGGED:
            return self._elementwise(name, given, out)
        found = {self.of(t) for t in having} - {ANY}
        if len(found) > 1:
            raise Unproven(name)
        along = found.pop()
        assert along is not None
        kept = kept_along(op, args, along, out, self._rows, [t for t in given if self.of(t) in (None, ANY)])
        if kept is None:
            raise Unproven(name)
        return kept

    def _elementwise(self, name: str, given: list[torch.Tensor], out: Any) -> int:
        """What broadcasts: rows meet rows, and nothing else has any there."""
        out = next(tensors_in(out))
        at = {self.of(t) + out.dim() - t.dim() for t in given if self.of(t) not in (None, ANY)}  # type: ignore[operator]
        if len(at) > 1 or (name.endswith("_") and self.of(given[0]) in (None, ANY)):
            raise Unproven(name)
        along = at.pop()
        for t in (t for t in given if self.of(t) is None):
            place = along - out.dim() + t.dim()
            if place >= 0 and t.shape[place] != 1:
                raise Unproven(name)
        return along


__all__ = ["Dry", "dry_run"]
