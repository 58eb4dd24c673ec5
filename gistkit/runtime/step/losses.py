"""The batch's loss from the losses of its parts.

**Losses of torch.nn.functional**, by arithmetic alone. A mean over rows is a sum S divided by a normaliser W. Part p
contributes S_p / W, so the contributions add up to S / W:

* ``cross_entropy`` and ``nll_loss`` of class labels: W is the number of labels that are not ``ignore_index``, or the
  sum of their ``weight``. Each part's share of W is counted on the device and summed before the first part, and S_p is
  the loss with ``reduction="sum"``. A part without a counted label contributes 0, where its mean would be NaN.
* Losses over elements, ``cross_entropy`` of class probabilities among them: W is proportional to the rows, so part p
  contributes its mean times its fraction of the rows.
* ``reduction="sum"``: part p contributes its sum.

S_p and S_p / W have the results' dtype; float16, whose sums overflow, is computed in float32. The host never waits.

**Any other function** may be a mean over what it counts itself (weights, labels that are not ignored), which no single
value or gradient of its own tells. It is refused, unless the caller vouches for it (``verify=False``): then a mean over
rows contributes its fraction of the rows, a sum itself."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn

Share = Callable[[Any, Any, float], Any]
"""(results of a part, its targets, its fraction of the rows) -> what the part contributes to the batch's loss."""
OVER_CLASSES = {nn.CrossEntropyLoss: F.cross_entropy, nn.NLLLoss: F.nll_loss}
OVER_ELEMENTS = {
    nn.BCELoss: F.binary_cross_entropy, nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.HingeEmbeddingLoss: F.hinge_embedding_loss, nn.HuberLoss: F.huber_loss, nn.KLDivLoss: F.kl_div,
    nn.L1Loss: F.l1_loss, nn.MSELoss: F.mse_loss, nn.PoissonNLLLoss: F.poisson_nll_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss, nn.SoftMarginLoss: F.soft_margin_loss,
}  # fmt: skip
FUNCTIONS = {**OVER_CLASSES, **OVER_ELEMENTS}
WEIGHTS = ("weight", "pos_weight")
WEIGHTED = (*OVER_CLASSES.values(), F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
OPTIONS = (*WEIGHTS, "ignore_index", "label_smoothing", "reduction")
REDUCTIONS = {"mean": "mean", "batchmean": "mean", "sum": "sum"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward")


def known_share(loss_fn: Any, targets: Any, bounds: Sequence[int], reduction: str | None) -> Share | None:
    """How the parts of a batch, whose rows ``bounds`` cut, contribute to its ``loss_fn``: a function of
    torch.nn.functional, a ``functools.partial`` of one with named arguments, or its module without hooks; None for any
    other. Raises ValueError where ``reduction`` names another than the loss has."""
    function, options = _call(loss_fn)
    own = REDUCTIONS.get(options.get("reduction", "mean"))
    if function is None or own is None or not isinstance(targets, torch.Tensor) or not targets.dim():
        return None
    if reduction not in (None, own):
        raise ValueError(
            f"step: reduction must be None or {own!r}, which {function.__name__} has here, got {reduction!r}; leave it "
            "out"
        )
    if function in OVER_CLASSES.values():
        if not targets.is_floating_point():
            return _over_classes(function, options, targets, bounds)
    elif any(isinstance(w := options.get(name), torch.Tensor) and w.dim() >= targets.dim() for name in WEIGHTS):
        return None  # weights of single rows
    return functools.partial(_over_elements, loss_fn, function.__name__, own)


def _call(loss_fn: Any) -> tuple[Callable | None, dict[str, Any]]:
    function, options = loss_fn, {}
    if type(loss_fn) in FUNCTIONS and not any(vars(loss_fn).get(name) for name in HOOKS):
        function = FUNCTIONS[type(loss_fn)]
        options = {name: getattr(loss_fn, name) for name in OPTIONS if hasattr(loss_fn, name)}
    elif isinstance(loss_fn, functools.partial) and not loss_fn.args:
        function, options = loss_fn.func, loss_fn.keywords
    foreign = ("size_average", "reduce", *(() if function in WEIGHTED else ("weight",)))
    if function not in FUNCTIONS.values() or any(options.get(name) is not None for name in foreign):
        return None, {}
    return function, options


def _over_classes(function: Callable, options: dict[str, Any], targets: torch.Tensor, bounds: Sequence[int]) -> Share:
    options = dict(options)
    normaliser: Any = 1
    if options.pop("reduction", "mean") == "mean":
        weight, ignored = options.get("weight"), options.get("ignore_index", -100)
        parts = (targets[start:stop] for start, stop in itertools.pairwise(bounds))
        normaliser = functools.reduce(torch.add, (_normaliser(t, weight, ignored) for t in parts))

    def share(out: Any, t: Any, fraction: float) -> Any:
        if isinstance(out, torch.Tensor) and out.dtype == torch.float16:
            out = out.float()
        return function(out, t, reduction="sum", **options) / normaliser

    return share


@torch.no_grad()
def _normaliser(targets: torch.Tensor, weight: torch.Tensor | None, ignored: int) -> torch.Tensor:
    counts = targets != ignored
    if weight is None:
        return counts.sum().float()
    weights = weight[targets.where(counts, 0).long()]
    return (weights * counts).sum(dtype=torch.promote_types(weight.dtype, torch.float32))


def _over_elements(
    loss_fn: Callable, name: str, reduction: str, out: Any, targets: torch.Tensor, fraction: float
) -> Any:
    if not isinstance(out, torch.Tensor) or out.shape != targets.shape:
        got = f"shape {tuple(out.shape)}" if isinstance(out, torch.Tensor) else f"a {type(out).__name__}"
        raise ValueError(
            f"step: {name} must be given results of the targets' shape {tuple(targets.shape)}, got {got}; others are "
            "broadcast, which compares rows with one another"
        )
    loss = loss_fn(out, targets)
    return loss if reduction == "sum" else loss * fraction


def stated_share(loss_fn: Callable[[Any, Any], Any], reduction: str | None) -> Share:
    """How the parts contribute to a loss that is, by its caller's word, the mean or the sum over the rows."""

    def share(out: Any, targets: Any, fraction: float) -> Any:
        loss = loss_fn(out, targets)
        return loss if reduction == "sum" or not isinstance(loss, torch.Tensor) else loss * fraction

    return share


def refuse_loss(loss_fn: Any) -> NoReturn:
    """Raise ValueError for a loss of the caller's own."""
    raise ValueError(
        "step: loss_fn must be a loss of torch.nn.functional or torch.nn, or functools.partial of one with named "
        "arguments, for sub-batches to be known to add up to the whole batch, got "
        f"{getattr(loss_fn, '__qualname__', type(loss_fn).__name__)}; pass that, or sub_batches=1, or, where it is the "
        "mean over the rows (or with reduction='sum' their sum) and rows do not depend on each other, verify=False"
    )
