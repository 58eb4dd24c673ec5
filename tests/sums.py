"""How far apart two sums of the same terms may be, and what the terms of a weight gradient are.

A float32 sum of n products, in any order and with fused multiply-adds or without, differs from the exact one by at most
gamma(n) times the sum of the products' absolute values, gamma(n) = n u / (1 - n u), u = 2**-24 (Higham, Accuracy and
Stability, section 3.1): two orders differ by at most twice that. Slices and sub-batches only reorder, as long as every
layer's input and output gradient have the same bits, which is asked first.
"""

from collections import defaultdict

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

ROUNDING = 2.0**-24


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
            self.inputs[name].append(args[0].detach().clone())
            out.register_hook(lambda grad: self.gradients[name].append(grad.clone()))

    def whole(self, name):
        """Input and output gradient of a layer for all rows."""
        return torch.cat(self.inputs[name]), torch.cat(self.gradients[name])


def assert_reordered_only(model, plain, other, plain_grads, other_grads):
    """The gradients of two steps (:class:`Operands` of both, gradients by parameter name) differ by no more than the
    order of summation explains."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv2d | nn.Linear):
            continue
        x, dy = plain.whole(name)
        assert torch.equal(x, other.whole(name)[0]) and torch.equal(dy, other.whole(name)[1]), name
        terms = dy.numel() // module.weight.shape[0]
        for part, size in _sizes(module, x.double().abs(), dy.double().abs()).items():
            difference = (plain_grads[f"{name}.{part}"].double() - other_grads[f"{name}.{part}"].double()).abs()
            assert (difference <= 2 * gamma(terms) * size).all(), (name, part)


def _sizes(module, x, dy):
    """The sums of the terms' absolute values, of weight and bias."""
    if isinstance(module, nn.Linear):
        return {"weight": dy.T @ x, "bias": dy.sum(0)}
    where = (module.stride, module.padding, module.dilation, module.groups)
    return {"weight": nn.grad.conv2d_weight(x, module.weight.shape, dy, *where), "bias": dy.sum((0, 2, 3))}
