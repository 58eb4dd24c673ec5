"""Running error analysis: how far any float32 evaluation of a training step may be from the exact one.

A model runs once, forward and backward, in float64, and every value carries a bound on what float32 makes of it
(:mod:`tests.support.near`), whatever the order of its sums. So one bound holds for the plain step, for slices and for
sub-batches of any size, and two of them differ by at most twice that.

Which element a max-pool takes and what a ReLU lets through must be the same for all of them: AssertionError where the
bound does not decide it (other data will). Holds for kernels that sum products: not for Winograd's or Fourier
transforms, which PyTorch's CPU has only without oneDNN, for batches of 16 rows and more.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from tests.support.near import Near, added, exact, linear_map, product, rounded, scaled, transposed
from tests.support.sums import ROUNDING, gamma

ELEMENTARY = 40 * ROUNDING
"""What exp and log may be off by, relatively. PyTorch's fastest vectorised exp (``exp_u20``) promises 20 units in the
last place, of at most 2 u each; its others and log, of SLEEF, 1 (``u10``)."""
MEAN = 4
"""Roundings of a mean beside its sum: a sub-batch's weight, the product by it, the count's inverse, the product."""
NORM = 12
"""Roundings of a batch norm by given statistics, in any form of it: sum with eps, root, inverse, and the products and
sums of x, mean, inverse, weight and bias."""


class Bounded:
    """Stands for a tensor in a model's forward. ``grads``: the contributions to its gradient, after backward."""

    def __init__(self, tape, near):
        self.tape, self.near, self.grads = tape, near, []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return RULES[func.__name__](*args, **(kwargs or {}))

    def __getattr__(self, name):
        if name not in RULES:
            raise AttributeError(f"no error analysis of {name}")
        return partial(RULES[name], self)

    def __add__(self, other):
        return _add(self, other)

    def __mul__(self, other):
        return _mul(self, other)

    def dim(self):
        return self.near.value.dim()


class Tape:
    """The operators of one forward."""

    def __init__(self):
        self._nodes, self._leaves = [], {}

    def of(self, x):
        """What stands for a tensor, the same each time; float32 has its values exactly."""
        if isinstance(x, Bounded):
            return x
        if id(x) not in self._leaves:
            self._leaves[id(x)] = x, Bounded(self, exact(x))  # x itself, so that no other has its id
        return self._leaves[id(x)][1]

    def node(self, near, operands, back):
        """The result of an operator; ``back``: its gradient -> its operands'."""
        result = Bounded(self, near)
        self._nodes.append((result, operands, back))
        return result

    def backward(self, loss):
        loss.grads.append(exact(torch.ones(())))
        for result, operands, back in reversed(self._nodes):
            if result.grads:
                for operand, grad in zip(operands, back(added(result.grads)), strict=True):
                    operand.grads.append(grad)


def _linear_node(f, *operands):
    """``f`` is linear in all operands together."""
    nears = [o.near for o in operands]
    zeros = [torch.zeros_like(n.value) for n in nears]

    def back(grad):
        for i, zero in enumerate(zeros):
            yield linear_map(transposed(lambda x, i=i: f(*zeros[:i], x, *zeros[i + 1 :]), zero), [grad])

    return operands[0].tape.node(linear_map(f, nears), operands, back)


def _product_node(f, x, weight, bias=None, spread=None):
    """``spread``: gives the bias the shape of the result."""
    tape = (x if isinstance(x, Bounded) else weight).tape
    x, weight, bias = tape.of(x), tape.of(weight), None if bias is None else tape.of(bias)
    a, b = x.near, weight.near
    more = None if bias is None else linear_map(spread, [bias.near])

    def back(grad):
        yield product(lambda g, w: transposed(lambda t: f(t, w), a.value)(g), grad, b)
        yield product(lambda g, t: transposed(lambda w: f(t, w), b.value)(g), grad, a)
        if bias is not None:
            yield linear_map(transposed(spread, bias.near.value), [grad])

    operands = (x, weight) if bias is None else (x, weight, bias)
    return tape.node(product(f, a, b, more), operands, back)


def _scaled_node(x, factor, roundings):
    return x.tape.node(scaled(x.near, factor, roundings), (x,), lambda grad: [scaled(grad, factor, roundings)])


def _add(a, b):
    return _linear_node(torch.add, a, b)


def _mul(a, b):
    return _product_node(torch.mul, a, b)


def _cat(tensors, dim=0):
    return _linear_node(lambda *parts: torch.cat(parts, dim), *tensors)


def _flatten(x, *dims):
    return _linear_node(lambda t: t.flatten(*dims), x)


def _sum(x, *dims):
    return _linear_node(lambda t: t.sum(*dims), x)


def _mean(x, *dims):
    total = _sum(x, *dims)
    return _scaled_node(total, total.near.value.numel() / x.near.value.numel(), MEAN)


def _conv2d(x, weight, bias, *options):
    shape = F.conv2d(x.near.value, weight.detach().double(), None, *options).shape
    return _product_node(
        lambda t, w: F.conv2d(t, w, None, *options), x, weight, bias, lambda b: b[:, None, None].expand(shape)
    )


def _linear(x, weight, bias=None):
    shape = (*x.near.value.shape[:-1], weight.shape[0])
    return _product_node(F.linear, x, weight, bias, lambda b: b.expand(shape))


def _relu(x, inplace=False):
    value, error = x.near.value, x.near.error
    assert ((value.abs() > error) | (error == 0)).all(), "the bound does not decide the sign of a ReLU's input"
    return _linear_node(lambda t: t * (value > 0), x)


def _max_pool2d(x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
    assert not ceil_mode
    stride = kernel_size if stride is None else stride
    value, error = x.near.value, x.near.error
    _, index = F.max_pool2d(value, kernel_size, stride, padding, dilation, return_indices=True)

    def windows(t, around):
        columns = F.unfold(F.pad(t, (padding,) * 4, value=around), kernel_size, dilation, 0, stride)
        return columns.unflatten(1, (t.shape[1], -1))

    values, errors = windows(value, -torch.inf), windows(error, 0.0)
    best = values.argmax(2, keepdim=True)
    ahead, doubt = values.gather(2, best) - values, errors.gather(2, best) + errors
    decided = (ahead > doubt) | (doubt == 0)
    assert decided.scatter(2, best, True).all(), "the bound does not decide a maximum"
    return _linear_node(lambda t: t.flatten(2).gather(2, index.flatten(2)).view(index.shape), x)


def _batch_norm(x, mean, var, weight, bias, training, momentum, eps):
    assert not training
    mean, inverse = mean.double()[:, None, None], (var.double() + eps).rsqrt()[:, None, None]
    near = rounded(x.near.value - mean, x.near.error, NORM, x.near.size + mean.abs())
    x = _scaled_node(x.tape.node(near, (x,), lambda grad: [grad]), inverse, NORM)
    return _product_node(
        lambda t, w: t * w[:, None, None], x, weight, bias, lambda b: b[:, None, None].expand(near.value.shape)
    )


def _log_softmax(near):
    """Of [rows, classes] over the classes: by maximum, exp, sum, log and differences."""
    value, most = near.value, near.error.max(1, keepdim=True).values
    top, classes = value.max(1, keepdim=True).values, value.shape[1]
    # exp is off by its argument's rounding, one of the distance to the maximum, and its own error; the sum, of positive
    # terms, by no more than that relatively, and its rounding. Its log is that of the number of classes at most. The
    # exact one moves by no more than the operands: by the target's own, and the largest of all
    distance = (top - value).max(1, keepdim=True).values + 2 * most
    terms = torch.expm1(ROUNDING * distance + ELEMENTARY + gamma(classes))
    log = -torch.log1p(-terms) + ELEMENTARY * (1 + torch.tensor(float(classes)).log())
    size = value.abs() + top.abs() + 2 * most + 1 + torch.tensor(float(classes)).log()
    return rounded(value.log_softmax(1), near.error + most + log, 3, size)


def _cross_entropy(
    x, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
):
    assert x.dim() == 2 and weight is None and label_smoothing == 0 and target.min() >= 0
    rows, logs = len(target), _log_softmax(x.near)
    hot = F.one_hot(target, x.near.value.shape[1]).double()
    share = 1 / rows if reduction == "mean" else 1.0
    near = rounded(-(logs.value * hot).sum(), (logs.error * hot).sum(), rows, (logs.size * hot).sum())
    near = scaled(near, share, MEAN)

    def back(grad):
        likely = logs.value.exp()
        off = likely * torch.expm1(logs.error + ELEMENTARY)
        near = product(torch.mul, Near(likely - hot, off), grad)
        size = (likely + off + hot) * grad.size
        return [rounded(near.value * share, near.error * share, 2 * MEAN, size * share)]

    return x.tape.node(near, (x,), back)


RULES = {
    "add": _add, "mul": _mul, "cat": _cat, "flatten": _flatten, "sum": _sum, "mean": _mean, "conv2d": _conv2d,
    "linear": _linear, "relu": _relu, "max_pool2d": _max_pool2d, "batch_norm": _batch_norm,
    "cross_entropy": _cross_entropy,
}  # fmt: skip


@dataclass(frozen=True)
class StepBounds:
    """Of a step's loss and of its parameters' gradients, by name."""

    loss: Near
    gradients: dict[str, Near]

    @property
    def looseness(self):
        """The largest error of a gradient as a share of the largest element of that gradient."""
        return max(float(g.error.max() / g.value.abs().max()) for g in self.gradients.values())

    def assert_holds(self, loss, gradients):
        """Of a step's loss and gradients by name; returns the largest share of a bound that is used up."""
        worst = 0.0
        for name, near, found in [
            ("loss", self.loss, loss),
            *((n, g, gradients[n]) for n, g in self.gradients.items()),
        ]:
            off = (found.double() - near.value).abs()
            share = float(torch.where(off == 0, 0.0, off / near.error).max())
            assert share <= 1, f"{name} is off by {share:.3g} times its bound"
            worst = max(worst, share)
        return worst


def step_bounds(model, loss_fn, x, target):
    """The bounds of ``loss_fn(model(x), target)`` and of its gradients; the model is any whose operators have RULES."""
    tape = Tape()
    loss = loss_fn(model(tape.of(x)), target)
    tape.backward(loss)
    return StepBounds(loss.near, {name: added(tape.of(p).grads) for name, p in model.named_parameters()})
