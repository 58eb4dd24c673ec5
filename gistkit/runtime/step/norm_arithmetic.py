"""Whether a step may be taken in parts: the rows of the model's results do not depend on each other, and the loss of
the batch is what those of its parts make.

Asked of the step itself, with a few rows and before its first part (:func:`check_parts`). A graph does not tell: any
operator may couple rows, along any dimension, while rows that are coupled come out otherwise in other company.

1. *Company.* Forwards of rows [a, b], [a, a] and [b, b]: a and b must come out the same whatever is beside them.
2. *Number.* a and b by themselves: nothing may depend on how many rows there are.
3. *Loss.* That of [a, b] must be the mean or sum of those of a and of b, and its gradients with respect to the results,
   through which all others go: values of weighted means are alike where the results are. Nothing goes backward through
   the model.
4. *Targets.* Likewise for every two neighbouring parts of the whole batch: their own targets, with the results of the
   few rows over and over, as no more forwards are run. Class weights and ignored labels show here.

a and b have one row each, or twice as many, up to those of a part, as long as fewer do not do: rows may belong together
in groups. Where a budget has no room for 1 and 2, operators must be known to keep rows apart
(:mod:`gistkit.runtime.step.row_independence`), and made-up results go into 3 and 4. Random draws are taken out, and a
copy of the model runs (:mod:`gistkit.runtime.step.deterministic_forward`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from gistkit.capture import joined, repeated, row_bytes, tensors_in
from gistkit.capture import rows as slices
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.step.deterministic_forward import GivenStatistics, called, copied_bytes, twin
from gistkit.runtime.step.loss_parts import Cut, Loss, LossParts
from gistkit.runtime.step.row_independence import Dry, dry_run
from gistkit.runtime.step.tolerances import company_tolerance, distance, halves, number_tolerance, roundoff, with_rows

NOISY = 16
"""How many times what two forwards of the same rows differ by a difference must be to mean anything."""
REMEDIES = (
    'pass sub_batches=1, or plan without sub-batches (fidelity="bitwise"), or take the parts for what they give with '
    "check=False"
)
GOLDEN = 0.6180339887
"""Multiples of it spread evenly, whatever their number."""

Results = list[tuple[tuple[slice, ...], Any]]
"""What a model gives for some parts of the batch: for the first, the second and both."""


class NoVerdict(Exception):
    """The question cannot be answered here; says why."""


def check_parts(model: torch.nn.Module, loss_fn: Loss, inputs: tuple[tuple, dict], targets: Any, cut: Cut) -> str:
    """Raise ValueError where the parts' gradients would not add up to those of the batch, or a budget leaves no room to
    find out. Returns why else that could not be found out, or an empty text.

    Takes forwards of a few rows without gradients; synchronises. Nothing of the model, its plan or the random states
    changes, but its hooks and ``loss_fn`` are called. Stays within ``cut.limit_bytes``.
    """
    if any(is_lazy(p) for p in model.parameters()):
        return "the model has lazy parameters, which its first forward makes"
    with LiveBytes(timeline=False) as live:
        live.track(model, *(p.grad for p in model.parameters() if p.grad is not None))
        live.track(*tensors_in([inputs, targets]))
        probe = _Probe(model, loss_fn, inputs, targets, cut, live)
        for rows in _doubling(cut.least):
            said, why = probe.verdict(rows)
            if not (said or why):
                return ""
    if said:
        raise ValueError(f"step: {said}; {REMEDIES}")
    return why.strip().split("\n")[0]


def _doubling(most: int) -> Iterator[int]:
    """1, 2, 4 and so on, ``most`` last."""
    n = 1
    while n < most:
        yield n
        n *= 2
    yield most


class _Probe:
    """A steady copy of the model, and what is found out with it."""

    def __init__(
        self, model: torch.nn.Module, loss_fn: Loss, inputs: tuple, targets: Any, cut: Cut, live: LiveBytes
    ) -> None:
        self.inputs, self.targets, self.cut, self.live, self._model = inputs, targets, cut, live, model
        self._statistics = GivenStatistics(cut.statistics)
        self._losses = LossParts(loss_fn, targets, cut, self._statistics)
        self._unit = roundoff(tensors_in([list(model.parameters()), inputs]))

    def verdict(self, rows: int) -> tuple[str, str]:
        """What is wrong with parts, as far as so many rows tell, and why they cannot tell; both empty where parts add
        up."""
        try:
            return self._differs(rows), ""
        except NoVerdict as error:
            return "", str(error)
        except Exception as error:  # few rows may be too few for the model; whatever it is, the step itself may run
            return "", f"{type(error).__name__}: {error}"

    def _differs(self, rows: int) -> str:
        if self.cut.limit_bytes is None:
            return self._compared(rows)
        dry = dry_run(self._model, slices(self.inputs, 0, 2 * rows), 2 * rows, self._statistics)
        out_bytes = sum(t.numel() * t.element_size() for t in tensors_in(dry.out))
        more_bytes = dry.peak_bytes + 4 * out_bytes + 2 * rows * row_bytes([self.inputs, self.targets])
        more_bytes += copied_bytes(self._model)
        lacking_bytes = self.live.current_bytes + more_bytes - self.cut.limit_bytes
        if lacking_bytes <= 0:
            return self._compared(rows, lacking_bytes + _grad_bytes(dry.out) <= 0)
        unproven = self._unproven(rows, dry)
        if unproven:
            return (
                f"whether {unproven} makes rows depend on each other must be found out before they are taken in "
                f"sub-batches, and the plan's budget has no room for the {more_bytes} bytes that it takes; plan with a "
                f"reserve of {lacking_bytes} bytes"
            )
        room_bytes = self.cut.limit_bytes - self.live.current_bytes - 4 * out_bytes
        room_bytes -= 2 * rows * row_bytes([self.inputs, self.targets])
        return self._loss_differs(self._stand_ins(rows, dry.out), rows, _grad_bytes(dry.out) <= room_bytes)

    def _unproven(self, rows: int, dry: Dry) -> str:
        """What may couple rows in a forward of 2 * rows rows that was told without memory; empty where nothing may."""
        alone = dry_run(self._model, slices(self.inputs, 0, rows), rows, self._statistics)
        return dry.unproven or ("" if dry.numbers == alone.numbers else "the number of rows")

    def _stand_ins(self, rows: int, like: Any) -> Results:
        """Results that no forward gave, of the kind of those of 2 * rows rows."""
        with torch.no_grad():
            made = tree_map(_made_up, like)
        a, b = self._ends(rows)
        shares = ((a,), 0, rows), ((b,), rows, 2 * rows), ((a, b), 0, 2 * rows)
        return [(parts, repeated(made, 2 * rows, start, stop)) for parts, start, stop in shares]

    def _ends(self, rows: int) -> tuple[slice, slice]:
        """The first and the last rows of the batch."""
        return slice(0, rows), slice(self.cut.batch - rows, self.cut.batch)

    def _forward(self, *parts: slice) -> Any:
        args, kwargs = joined(self.inputs, parts)
        return called(twin(self._model), args, kwargs, self._statistics)  # what a forward leaves in it goes with it

    def _compared(self, rows: int, with_grads: bool = True) -> str:
        a, b = self._ends(rows)
        first, both = self._forward(a), self._forward(a, b)
        for half, part in enumerate((a, b)):
            mine = halves(both, half, first)
            off = distance(mine, halves(self._forward(part, part), half, first))
            if off > company_tolerance(mine):
                return self._coupled(off, both, (a, b))
        second = self._forward(b)
        unit = max(self._unit, roundoff(tensors_in(both)))
        for half, alone in enumerate((first, second)):
            off = distance(halves(both, half, alone), with_rows(alone, both))
            if off > number_tolerance(unit):
                return self._coupled(off, both, (a, b))
        return self._loss_differs([((a,), first), ((b,), second), ((a, b), both)], rows, with_grads)

    def _loss_differs(self, outs: Results, rows: int, with_grads: bool) -> str:
        """What is wrong with the losses of two parts' results and of both; then with those of all targets."""
        (_, first), _, (_, both) = outs
        held_bytes = self.live.current_bytes
        self.live.reset_peak()
        said = self._losses.few(outs, max(self._unit, roundoff(tensors_in(both))), with_grads)
        each_bytes = (self.live.peak_bytes - held_bytes) // (2 * rows) + 1
        if said or len(with_rows(first, both)) < len(list(tensors_in(both))):
            return said
        most_rows, limit = self.cut.least, self.cut.limit_bytes
        while limit is not None and most_rows and held_bytes + 2 * (most_rows + 1) * each_bytes > limit:
            most_rows //= 2
        return self._losses.all_targets(both, 2 * rows, most_rows) if most_rows else ""

    def _coupled(self, off: float, both: Any, parts: tuple[slice, slice]) -> str:
        again = distance(list(tensors_in(both)), list(tensors_in(self._forward(*parts))))
        if off <= NOISY * again:
            raise NoVerdict(f"two forwards of the same rows differ by {again:.1e} of their largest value")
        if self._statistics.seen and not self.cut.statistics:
            return (
                "a batch norm must see the whole batch, and torch.nn.functional.batch_norm in training mode would see "
                f"{len(self.cut.bounds) - 1} sub-batches, each with its own statistics; accept that with "
                "batch_statistics='per_sub_batch'"
            )
        return (
            "the rows of a batch must not depend on each other to be taken in sub-batches, and what the model gives "
            f"for a row changes with the rows beside it, by {off:.1e} of the largest value"
        )


def _grad_bytes(out: Any) -> int:
    """What gradients of a loss of such results take beside its value: those of two parts and of both, and what the loss
    keeps for them and hands back, in float32 at least."""
    return 4 * sum(t.numel() * max(t.element_size(), 4) for t in tensors_in(out))


def _made_up(t: Any) -> Any:
    """Values of a fake tensor's kind that any loss takes: between 0 and 1, or 0."""
    if not isinstance(t, torch.Tensor):
        return t
    real = torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    if t.is_floating_point():
        n = max(real.numel(), 1)
        real += (torch.arange(n, device=t.device, dtype=torch.float32) * GOLDEN % 0.8 + 0.1).view(t.shape)
    return real


__all__ = ["Cut", "check_parts"]
