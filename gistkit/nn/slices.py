"""Batch slices: how much of a decoded input exists at a time while a weight gradient is taken.

A weight gradient is a sum over the batch. Taken in slices it needs one slice of the decoded input at a time, and sums
in another order (class ``reassociated``); partial sums of bf16 and fp16 gradients are carried in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gistkit.nn.keep import Kept

Gradients = tuple[torch.Tensor | None, ...]


def demand_slices(op: str, slices: int) -> None:
    """Raise ValueError unless slices is a positive int."""
    if type(slices) is not int or slices < 1:
        raise ValueError(
            f"gistkit.functional.{op}: weight_grad_slices must be an int of at least 1, got {slices!r}; "
            "pass 1 for exact sums"
        )


def row_slices(kept: Kept, n: int, slices: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """At most ``slices`` nearly equal runs of n rows, each with the kept tensor's rows.

    A Kept that offers ``dense_rows(start, stop)`` decodes row by row; of any other the whole tensor exists meanwhile.
    """
    dense_rows = getattr(kept, "dense_rows", None)
    if dense_rows is None:
        whole = kept.dense()
        dense_rows = lambda start, stop: whole[start:stop]  # noqa: E731
    count = min(slices, n)
    for i in range(count):
        start, stop = i * n // count, (i + 1) * n // count
        yield slice(start, stop), dense_rows(start, stop)


def summed(parts: Iterator[Gradients]) -> Gradients:
    """The sums over the parts, position by position; None stays None. At least one part."""
    first = next(parts)
    dtypes = [None if g is None else g.dtype for g in first]
    totals = [None if g is None else g.to(torch.float32) for g in first]
    for part in parts:
        for total, g in zip(totals, part, strict=True):
            if total is not None and g is not None:
                total.add_(g)
    return tuple(t if t is None else t.to(d) for t, d in zip(totals, dtypes, strict=True))
