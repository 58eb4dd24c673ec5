"""How far apart two sums of the same terms may be, and what the terms of a weight gradient are.

A float32 sum of n products, in any order and with fused multiply-adds or without, differs from the exact one by at most
gamma(n) times the sum of the products' absolute values, gamma(n) = n u / (1 - n u), u = 2**-24 (Higham, Accuracy and
Stability, section 3.1): two orders differ by at most twice that. Slices and sub-batches only reorder, as long as every
layer's input and output gradient have the same bits. Where they have not, each gradient is still held to its own terms
here.
"""

from collections import defaultdict

import torch
from torch import nn
from torch.nn.grad import conv2d_weight
from torch.nn.modules.module import register_module_forward_hook

ROUNDING = 2.0**-24
WIDER = 1 + 2.0**-20
"""For the roundings of the exact sums in float64, each 2**-29 of float32's."""


def gamma(terms):
    """The bound's factor for so many terms."""
    return terms * ROUNDING / (1 - terms * ROUNDING)


class Operands:
    """Within it, the inputs and output gradients of a model's convolutions and linear layers, forward by forward."""

    def __init__(self, model):
        self._names = {m: name for name, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
        self.inputs, self.gradients = defaultdict(list), defaultdict(list)

    def __enter__(self):
        self._hook = register_module_forward_hook(self._seen)
        return self

    def __exit__(self, *_):
        self._hook.remove()

    def _seen(self, module, args, out):
        name = self._names.get(module)
        if name is not None:
            with torch._C.DisableTorchFunction():  # no call of the model's, as a runtime counts them
                self.inputs[name].append(args[0].detach().clone())
                out.register_hook(lambda grad: self.gradients[name].append(grad.clone()))

    def whole(self, name):
        """Input and output gradient of a layer for all rows."""
        return torch.cat(self.inputs[name]), torch.cat(self.gradients[name])


def assert_reordered_only(model, plain, other, plain_grads, other_grads):
    """The gradients of two steps (:class:`Operands` of both, gradients by parameter name) differ by no more than the
    order of summation explains."""
    for name in plain.inputs:
        (x, dy), (others_x, others_dy) = plain.whole(name), other.whole(name)
        assert torch.equal(x, others_x) and torch.equal(dy, others_dy), name
    assert_sums(model, plain, plain_grads)
    assert_sums(model, other, other_grads)


def assert_sums(model, operands, grads):
    """The gradients of convolutions and linear layers are the sums of their terms over all rows that went through,
    as far as the order of summation leaves them; so two orders of the same terms differ by twice that."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv2d | nn.Linear):
            continue
        x, dy = (t.double() for t in operands.whole(name))
        terms = dy.numel() // module.weight.shape[0]
        sizes = _sums(module, x.abs(), dy.abs())
        for part, exact in _sums(module, x, dy).items():
            if getattr(module, part) is not None:
                off = (grads[f"{name}.{part}"].double() - exact).abs()
                assert (off <= WIDER * gamma(terms) * sizes[part]).all(), (name, part)


def _sums(module, x, dy):
    """The gradients of weight and bias."""
    if isinstance(module, nn.Linear):
        return {"weight": dy.T @ x, "bias": dy.sum(0)}
    where = (module.stride, module.padding, module.dilation, module.groups)
    return {"weight": conv2d_weight(x, module.weight.shape, dy, *where), "bias": dy.sum((0, 2, 3))}
