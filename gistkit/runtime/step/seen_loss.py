"""What a loss function of the caller's own does, call by call: often no more than to hand results and targets, reshaped
within their rows, to one loss of torch.nn.functional, whose result it returns.

Such a mean is a sum over elements divided by their number, or by the number of labels that are not ignored. Where each
part has that number in proportion to its rows, the parts' means add up to the batch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from gistkit.capture import is_metadata, tensors_in

OVER_CLASSES = {nn.CrossEntropyLoss: F.cross_entropy, nn.NLLLoss: F.nll_loss}
OVER_ELEMENTS = {
    nn.BCELoss: F.binary_cross_entropy, nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.HingeEmbeddingLoss: F.hinge_embedding_loss, nn.HuberLoss: F.huber_loss, nn.KLDivLoss: F.kl_div,
    nn.L1Loss: F.l1_loss, nn.MSELoss: F.mse_loss, nn.PoissonNLLLoss: F.poisson_nll_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss, nn.SoftMarginLoss: F.soft_margin_loss,
}  # fmt: skip
FUNCTIONS = frozenset((*OVER_CLASSES.values(), *OVER_ELEMENTS.values()))
_T = torch.Tensor
WITHIN_ROWS = frozenset((_T.flatten, torch.flatten, _T.view, _T.reshape, torch.reshape, _T.contiguous, _T.float))
"""Calls after which a row's elements still lie behind those of the row before."""
PLAIN = (int, float, str, bool, type(None))


class SeenLoss(TorchFunctionMode):
    """The calls of a loss function over ``given``. After :meth:`returned`, ``kind`` is the loss of FUNCTIONS that it
    is, with its options, None where it does anything else, and ``labels`` a view of the
    targets whose labels that is the mean of."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        # a copy of the targets is not held: what it was made of has the same labels
        self._views = {id(t): (t, t) for t in tensors_in(given)}
        self._alone, self._result = True, None
        self.kind: tuple | None = None
        self.labels: torch.Tensor | None = None

    def __torch_function__(self, func: Any, _: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if torch.compiler.is_compiling():
            return result
        if self._result is None and func in FUNCTIONS:
            self._result, self.kind = result, self._kind(func, args, kwargs)
        elif args and id(args[0]) in self._views and _keeps_rows(func, args):
            view = self._views[id(args[0])][1]
            same = result.untyped_storage()._cdata == view.untyped_storage()._cdata
            self._views[id(result)] = result, result if same else view
        elif not is_metadata(func):
            self._alone = False
        return result

    def returned(self, loss: Any) -> None:
        """The function has returned ``loss``; its tensors are no longer held."""
        if not self._alone or loss is not self._result:
            self.kind = None
        self._views, self._result = {}, None

    def _kind(self, func: Callable, args: tuple, kwargs: dict) -> tuple | None:
        """The loss with its options, where results and targets are all of its tensors."""
        options = dict(zip(_names(func)[2:], args[2:], strict=False)) | kwargs
        reduction = options.setdefault("reduction", "mean")
        if len(args) < 2:
            return None
        x, targets = args[0], args[1]
        known = id(x) in self._views and id(targets) in self._views
        if not known or reduction not in ("mean", "sum") or not all(type(v) in PLAIN for v in options.values()):
            return None
        if any(options.get(name) is not None for name in ("size_average", "reduce")):
            return None
        labels = func in OVER_CLASSES.values() and not targets.is_floating_point()
        if not labels and x.shape != targets.shape:
            return None
        if labels and reduction == "mean":
            self.labels = self._views[id(targets)][1].detach()
        return func, tuple(sorted(options.items()))


def adds_up(seen: Sequence[SeenLoss], rows: Sequence[int]) -> bool:
    """Whether parts of so many rows did the same, over labels whose numbers grow with the rows. Waits for the device
    where labels may be ignored."""
    kinds = {part.kind for part in seen}
    if None in kinds or len(kinds) > 1:
        return False
    ignored = dict(seen[0].kind[1]).get("ignore_index", -100)  # type: ignore[index]
    labels = [part.labels for part in seen if part.labels is not None]
    counted = torch.stack([(t != ignored).sum() for t in labels]).tolist() if labels else rows
    return all(n * rows[0] == counted[0] * r for n, r in zip(counted, rows, strict=True))


@lru_cache(maxsize=64)
def _names(func: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(func).parameters)


def _keeps_rows(func: Callable, args: tuple) -> bool:
    if func is _T.__getitem__:  # the same part of every row
        where = args[1]
        return type(where) is tuple and all(type(i) in (slice, int) for i in where) and where[0] == slice(None)
    if func is _T.transpose:
        return len(args) == 3 and min(args[1:]) > 0
    return func in WITHIN_ROWS
