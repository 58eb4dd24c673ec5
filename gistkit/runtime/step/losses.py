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

**Functions of the caller's own**, taken for a mean or a sum over rows and compared with that in every step.
When the parts are done, and with them their activations, each is halved, and for every two neighbouring pieces a and b

    L(a + b) = s_a L(a) + s_b L(b)      s: the fraction of the rows for a mean, 1 for a sum

must hold of their targets, and so must its gradients with respect to the results: of logits that are nearly alike every
weighted mean of cross entropies is the logarithm of their number, so values do not tell. The results are made up, in
the shapes of the first part's. Two pieces are as many rows as a part, so this takes about its loss's bytes. A function
that only hands results and targets on to one loss of torch.nn.functional (:mod:`.seen_loss`) is compared so in its
first step of a kind; in later ones its numbers of labels tell whether the parts add up."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch.linalg import vector_norm

from gistkit.capture import joined, no_autocast_cache, tensors_in, untouched_random_states
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.step.row_independence import REMEDIES, ConstantDraws, isolated
from gistkit.runtime.step.seen_loss import OVER_CLASSES, OVER_ELEMENTS, SeenLoss, adds_up

Share = Callable[[Any, Any, float], Any]
"""(results of a part, its targets, its fraction of the rows) -> what the part contributes to the batch's loss."""
FUNCTIONS = {**OVER_CLASSES, **OVER_ELEMENTS}
WEIGHTS = ("weight", "pos_weight")
WEIGHTED = (*OVER_CLASSES.values(), F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
OPTIONS = (*WEIGHTS, "ignore_index", "label_smoothing", "reduction")
REDUCTIONS = {"mean": "mean", "batchmean": "mean", "sum": "sum"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward")
STATED = {"mean": "the mean over its rows", "sum": "the sum over its rows"}
ADVICE = (
    "pass reduction='sum' where it is the sum; where labels are ignored or classes weighted pass torch.nn.functional's "
    "loss itself, or, with reduction='sum', the sum divided by the weight of the whole batch; one over pairs of rows "
    "has no parts"
)
GOLDEN = 0.6180339887
"""Its multiples are spread evenly, whatever their number."""
TINY = 1e-300
NOISE = 64 * 2.0**-24
"""What roundings of float32 may make of a gradient that is zero, of the loss."""
TOLERANCE = 2.0**-12
"""Half the digits of float32."""

_Made = tuple[torch.Tensor, tuple[torch.Tensor, ...]]
"""A loss of made-up results, as float64, and its gradients for them."""


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


KINDS = 64
"""Of so many kinds of steps of a loss function it is known that they add up, before all are forgotten."""
_compared: WeakKeyDictionary[Any, set[tuple | None]] = WeakKeyDictionary()


class ComparedLoss:
    """A loss function in the parts of one step, which ``bounds`` cut. ``verify``: whether it will be compared."""

    def __init__(self, loss_fn: Callable[[Any, Any], Any], reduction: str, bounds: Sequence[int], verify: bool) -> None:
        self._loss_fn, self._reduction, self._bounds, self._verify = loss_fn, reduction, bounds, verify
        self._seen: list[SeenLoss] = []
        self._like: Any = None  # the first part's results, on the meta device
        self._device = torch.device("cpu")

    def share(self, out: Any, targets: Any, fraction: float) -> Any:
        """What a part with that fraction of the rows contributes to the batch's loss."""
        if self._like is None:
            with suppress(Exception):  # compare() says what came of it
                self._device = next(tensors_in(out)).device
                self._like = _replaced(out, lambda t: torch.empty_like(t, device="meta", requires_grad=False))
        if self._verify:
            with SeenLoss((out, targets)) as seen:
                loss = self._loss_fn(out, targets)
            seen.returned(loss)
            self._seen.append(seen)
        else:
            loss = self._loss_fn(out, targets)
        return loss * fraction if self._reduction == "mean" and isinstance(loss, torch.Tensor) else loss

    def compare(self, targets: Any, room_bytes: Callable[[], int | None]) -> None:
        """Raise ValueError where the batch's loss is not what its parts contribute, or where that cannot be told, as
        ``room_bytes()`` (None: any) are too few. Calls the function, or a copy of a module, unless it is known to hand
        its arguments on to a loss of torch.nn.functional. Synchronises once."""
        kind = self._kind()
        known: set[tuple | None] = set() if kind is None else _compared.setdefault(self._loss_fn, set())
        if kind not in known:
            self._compare(targets, room_bytes())
            if len(known) >= KINDS:
                known.clear()
            known.add(kind)

    def _kind(self) -> tuple | None:
        """What tells steps apart in which the parts of such a function add up alike; None where they may not."""
        if not adds_up(self._seen, [b - a for a, b in itertools.pairwise(self._bounds)]):
            return None
        try:
            hash(weakref.ref(self._loss_fn))
        except TypeError:  # such a function cannot be remembered
            return None
        return (
            self._seen[0].kind,
            self._reduction,
            tuple(self._bounds),
            tuple((t.shape, t.dtype) for t in tensors_in(self._like)),
        )

    def _compare(self, targets: Any, room_bytes: int | None) -> None:
        stated = f"{STATED[self._reduction]} (reduction={self._reduction!r})"
        loss_fn: Any = self._loss_fn
        try:
            loss_fn = isolated(loss_fn, _unwritten) if isinstance(loss_fn, torch.nn.Module) else loss_fn
            made = functools.partial(self._made, loss_fn, targets)
            with untouched_random_states(), no_autocast_cache(), torch.autocast(self._device.type, enabled=False):
                pieces = self._pieces(made, room_bytes)
                found, first = [], made(pieces, 0, pieces[1])
                for a, b, c in zip(pieces, pieces[1:], pieces[2:], strict=False):
                    shares = ((b - a) / (c - a), (c - b) / (c - a)) if self._reduction == "mean" else (1.0, 1.0)
                    both, second = made(pieces, a, c), made(pieces, b, c)
                    found.append(_off(both, first, second, shares))
                    first = second
                    del both  # before the next is made
                figures = torch.stack(found).tolist()
        except Exception as error:
            cause = f"{type(error).__name__}: " + str(error).strip().split("\n")[0]
            raise ValueError(
                f"step: loss_fn could not be compared with {stated} on made-up results, float32 between 0.1 and 0.9: "
                f"{cause}; {REMEDIES}"
            ) from error
        for a, b, c, (whole, first, second, *off) in zip(pieces, pieces[1:], pieces[2:], figures, strict=False):
            if not all(n <= TOLERANCE for n in off):  # also where one is not a number
                raise ValueError(
                    f"step: loss_fn must return {stated} for sub-batches to add up, and of {c - a} rows with made-up "
                    f"results it is {whole:.6g}, of their first {b - a} {first:.6g} and of the others {second:.6g}, "
                    f"its gradients off by {max(off[1:], default=0):.1e} of the largest; {ADVICE}; {REMEDIES}"
                )

    def _pieces(self, made: Callable[..., _Made], room_bytes: int | None) -> list[int]:
        """Bounds of the halves of the parts, or of smaller pieces of which two have room."""
        most_rows = self._bounds[-1]
        if room_bytes is not None:
            with LiveBytes(timeline=False) as live:
                _, grads = made([0], 0, 1)
            each_bytes = live.peak_bytes + sum(g.numel() * g.element_size() for g in grads)
            most_rows = room_bytes // (2 * each_bytes)
            if most_rows < 1:
                lacking_bytes = 2 * each_bytes - room_bytes
                raise MemoryError(f"it takes {2 * each_bytes} bytes; plan with a budget of {lacking_bytes} bytes more")
        found = {0}
        for start, stop in itertools.pairwise(self._bounds):
            count = max(2, -(-(stop - start) // most_rows))
            found |= {start + (i + 1) * (stop - start) // count for i in range(count)}
        return sorted(found)

    def _made(self, loss_fn: Callable, targets: Any, pieces: Sequence[int], start: int, stop: int) -> _Made:
        """The loss of rows ``start`` to ``stop``, which may overwrite results and targets."""
        leaves: list[torch.Tensor] = []

        def result(like: torch.Tensor) -> torch.Tensor:
            with self._device:
                t = _made_up(like, self._bounds[1], pieces, start, stop)
            if not like.is_floating_point():
                return t.to(like.dtype)
            leaves.append(t.to(torch.promote_types(like.dtype, torch.float32)).requires_grad_())
            return leaves[-1].clone()

        with torch.enable_grad():
            out = _replaced(self._like, result)
            with ConstantDraws():
                loss = loss_fn(out, joined(targets, [slice(start, stop)]))
            grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        return loss.detach().double().reshape(()), grads


def _off(both: _Made, first: _Made, second: _Made, shares: Sequence[float]) -> torch.Tensor:
    """The losses of two pieces together, of the first and of the second; how far off the loss is, relative to its
    terms, and each gradient, relative to its largest value."""
    (loss, grads), (first_loss, first_grads), (second_loss, second_grads) = both, first, second
    parts = first_loss * shares[0], second_loss * shares[1]
    terms, off = parts[0].abs() + parts[1].abs(), []
    for whole, ahead, behind in zip(grads, first_grads, second_grads, strict=True):
        if not whole.numel():
            continue
        if whole.dim() and len(whole) == len(ahead) + len(behind):
            pairs = zip(whole.split([len(ahead), len(behind)]), (ahead, behind), shares, strict=True)
            apart = torch.stack([vector_norm(torch.sub(w, g, alpha=share), math.inf) for w, g, share in pairs]).max()
        else:  # of what has no rows
            apart = vector_norm(whole - ahead * shares[0] - behind * shares[1], math.inf)
        noise = NOISE * loss.abs() / whole.numel()
        off.append((apart - noise).clamp_min(0) / vector_norm(whole, math.inf).double().clamp_min(TINY))
        terms = terms + vector_norm(whole, 1)
    values = (loss - parts[0] - parts[1]).abs() / terms.clamp_min(TINY)
    return torch.stack([loss, first_loss, second_loss, values, *off])


def _made_up(like: torch.Tensor, rows: int, pieces: Sequence[int], start: int, stop: int) -> torch.Tensor:
    """Rows ``start`` to ``stop`` of values for a tensor like one of ``rows`` rows, several entries a row perhaps; one
    without rows stays as long as it is. Between 0.1 and 0.9, in every other piece up to 0.5 only: pieces whose means
    are alike would hide what is made of a mean, as its root is."""
    length, *shape = like.shape or (1,)
    each = length // rows if like.dim() and length % rows == 0 else 0
    entries = torch.arange(start * each, stop * each) if each else torch.arange(length)
    slopes = (entries.double() + 1).mul_(GOLDEN).remainder_(1)
    values = torch.outer(slopes.float(), torch.arange(1.0, math.prod(shape) + 1)).remainder_(0.8)
    if each:
        halved = torch.bucketize(entries // each, torch.tensor(pieces), right=True) % 2
        values /= 1 + halved[:, None]
    return values.add_(0.1).view(entries.shape[: like.dim()] + tuple(shape))


def _replaced(item: Any, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return copy.deepcopy(item, {id(t): tensor(t) for t in tensors_in(item)})


def _unwritten(t: torch.Tensor) -> torch.Tensor:
    return t if t.requires_grad or isinstance(t, torch.nn.Parameter) else t.detach().clone()
