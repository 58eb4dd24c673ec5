"""Values with bounds on what float32 makes of them, and the arithmetic of these.

A sum of n products, in any order, with fused multiply-adds or without, is off by at most gamma(n) times the sum of
their absolute values, gamma(n) = n u / (1 - n u), u = 2**-24 (Higham, Accuracy and Stability, section 3.1); to which
comes what the operands are off by. How many terms a sum has is counted, by the same function over ones.
"""

from dataclasses import dataclass

import torch

from tests.support.sums import WIDER, gamma

LEAST = 2.0**-149
"""What a product that underflows may be off by: the distance of subnormal numbers."""


@dataclass(frozen=True)
class Near:
    """The exact ``value`` of a tensor, and what float32's may be off by, element by element; both float64."""

    value: torch.Tensor
    error: torch.Tensor

    @property
    def size(self):
        """The largest magnitude that float32's may have."""
        return self.value.abs() + self.error


def exact(x):
    """A tensor whose values float32 has exactly."""
    return Near(x.detach().double(), torch.zeros_like(x, dtype=torch.float64))


def rounded(value, error, roundings, size):
    """What is off by an error already, after so many roundings of terms whose magnitudes sum up to size."""
    underflow = roundings * LEAST * (size > 0)
    return Near(value, (error + gamma(roundings) * size + underflow) * WIDER)


def added(parts):
    """The sum of several tensors."""
    size = sum(p.size for p in parts)
    return rounded(sum(p.value for p in parts), sum(p.error for p in parts), len(parts) - 1, size)


def scaled(near, factor, roundings):
    """The product by numbers that float32 has to find out, with so many roundings."""
    return rounded(near.value * factor, near.error * abs(factor), roundings, near.size * abs(factor))


def linear_map(f, parts):
    """f, linear in all its operands together, with coefficients 0 and 1."""
    values, errors, sizes = ([getattr(p, name) for p in parts] for name in ("value", "error", "size"))
    terms = int(f(*map(torch.ones_like, values)).max())
    return rounded(f(*values), f(*errors), max(terms - 1, 0), f(*sizes))


def product(f, a, b, more=None):
    """f, linear in either operand, with coefficients 0 and 1, plus ``more``, an addend of its shape."""
    size, terms = f(a.size, b.size), int(f(torch.ones_like(a.value), torch.ones_like(b.value)).max())
    value, error = f(a.value, b.value), size - f(a.value.abs(), b.value.abs())
    if more is None:
        return rounded(value, error, terms, size)
    return rounded(value + more.value, error + more.error, terms + 1, size + more.size)


def transposed(f, like):
    """The transpose of a linear function of a tensor like this."""
    x = torch.zeros_like(like, requires_grad=True)
    return lambda grad: torch.autograd.grad(f(x), x, grad)[0]
