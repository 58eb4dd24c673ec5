"""Convolution, linear layer and batch norm.

PyTorch's node of a convolution or linear layer takes both gradients in one call and holds the decoded input meanwhile.
Gistkit's nodes take the weight gradient first and let go of the decoded input before the input gradient is taken, which
is less memory and two calls of the library; they run where there is no room for PyTorch's. Batch norm is PyTorch's own
with its node's saved input replaced by what is planned; it is recorded where rebuilds start from it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import Parameter

from gistkit.capture import BatchNorm, Conv2d, Linear, bind, takes_conv2d, takes_linear
from gistkit.nn import conv
from gistkit.nn.eligible import recorded
from gistkit.nn.keep import PACKED, Kept, SavedAsIs, replace_saved
from gistkit.nn.linear import linear
from gistkit.nn.norm import keeps_its_input
from gistkit.nn.standin import settings
from gistkit.runtime.calls.engines import taken
from gistkit.runtime.calls.kinds import SpecialisedCall, TensorKind, autocast_dtype, weight_kind
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.program.match_plan import check_call
from gistkit.runtime.program.program import Step
from gistkit.runtime.rebuild.terms import NormSource, geometry_of
from gistkit.runtime.stash.stash import DENSE_VALUES


def specialised_conv2d(state: ForwardState, step: Step, b: Conv2d) -> SpecialisedCall | None:
    """How a convolution over such operands runs as planned."""
    x, weight = b.x, b.weight
    if not takes_conv2d(x, weight):
        return None
    native = type(weight) is Parameter and weight.requires_grad and type(b.padding) is tuple and x.dim() == 4
    alone = not x.requires_grad and not step.choice.algorithm  # its node takes one gradient
    if native and (alone or step.choice.joint or state.has_room(step.index, x)):
        return NativeConv2d(state, step, b)
    return SplitConv2d(state, step, b)


def specialised_linear(state: ForwardState, step: Step, b: Linear) -> SpecialisedCall | None:
    """How a linear layer over such operands runs as planned."""
    if not takes_linear(b.x, b.weight, b.bias):
        return None
    roomy = step.choice.joint or state.has_room(step.index, b.x)
    native = roomy and type(b.weight) is Parameter and b.weight.requires_grad
    return (NativeLinear if native else SplitLinear)(state, step, b)


class NativeConv2d(SpecialisedCall):
    """PyTorch's convolution; how its input is kept depends on the input alone."""

    def __init__(self, state: ForwardState, step: Step, b: Conv2d) -> None:
        self._decision, self._options = step.input, b[3:]
        self._given = TensorKind(b.x) if state.strict else None

    def fits(self, x: Any, weight: Any, bias: Any, *options: Any) -> bool:
        own = type(weight) is Parameter and weight.requires_grad and options == self._options
        return own and (self._given is None or self._given.fits(x))

    def at(self, state: ForwardState, module: Any, x: Any) -> torch.Tensor | None:
        own = module._parameters
        values = x, own["weight"], own["bias"], module.stride, module.padding, module.dilation, module.groups
        return self(state, *values) if self.fits(*values) else None

    def __call__(self, state: ForwardState, x: torch.Tensor, weight: Any, bias: Any, *options: Any) -> torch.Tensor:
        y: Any = torch.conv2d(x, weight, bias, *options)
        if self._given is not None:
            # under autocast its copy of x is saved, another tensor
            saved = x if y.dtype is x.dtype else y.grad_fn._saved_input
            if not state.stays_as_it_is(saved, self._decision):
                replace_saved(y.grad_fn, "input", state.keep(saved, self._decision))
            return y
        known = state.table.hold(x) if y.dtype is x.dtype else None
        decision = self._decision
        if known is not None:
            y.grad_fn._raw_saved_input.register_hooks(PACKED, known.dense)
        elif decision is None or not decision.stays:
            y.grad_fn._raw_saved_input.register_hooks(partial(state.keep, decision=decision), DENSE_VALUES)
        return y


class SplitConv2d(SpecialisedCall):
    """Gistkit's convolution, prepared for operands of one kind under one setting of autocast and the libraries."""

    def __init__(self, state: ForwardState, step: Step, b: Conv2d) -> None:
        self.step = step
        self._x, self._weight, self._bias = TensorKind(b.x), weight_kind(b.weight), weight_kind(b.bias)
        self._options, self._lowered, self._settings = b[3:], autocast_dtype(b.x), settings()
        trained = recorded(b.x, b.weight, b.bias)
        self._call = conv.prepare(b.x, b.weight, self._options) if trained else None
        if self._call is not None:
            self._call.engines = taken(state, step, self._call, b)

    def fits(self, x: Any, weight: Any, bias: Any, *options: Any) -> bool:
        return (
            self._x.fits(x)
            and weight_kind(weight) == self._weight
            and weight_kind(bias) == self._bias
            and options == self._options
            and autocast_dtype(x) is self._lowered
            and settings() == self._settings
        )

    def at(self, state: ForwardState, module: Any, x: Any) -> torch.Tensor | None:
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        values = x, weight, bias, module.stride, module.padding, module.dilation, module.groups
        return self(state, *values) if type(weight) is Parameter and self.fits(*values) else None

    def __call__(self, state: ForwardState, x: torch.Tensor, weight: Any, bias: Any, *options: Any) -> torch.Tensor:
        if self._call is None:
            return torch.conv2d(x, weight, bias, *options)
        if state.tape is not None and "forward" in self._call.engines:
            state.tape.run_again_by(self._again)
        keep = partial(state.keep, decision=self.step.input)
        return conv.carry_out(self._call, x, weight, bias, keep)

    def _again(self, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        b: Any = bind(func, args, kwargs)
        assert self._call is not None
        return conv.again(self._call, b.x, b.weight, b.bias)


class SplitLinear(SpecialisedCall):
    """Gistkit's linear layer; it takes an input of that geometry."""

    def __init__(self, state: ForwardState, step: Step, b: Linear) -> None:
        self.step, self._x = step, TensorKind(b.x)

    def fits(self, x: Any, *_: Any) -> bool:
        return self._x.fits(x)

    def at(self, state: ForwardState, module: Any, x: Any) -> torch.Tensor | None:
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        return self(state, x, weight, bias) if type(weight) is Parameter and self.fits(x, weight, bias) else None

    def __call__(self, state: ForwardState, x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
        keep = partial(state.keep, decision=self.step.input)
        return linear(x, weight, bias, keep=keep)


class NativeLinear(SplitLinear):
    """PyTorch's linear layer with its node's saved input replaced by what is planned."""

    def __init__(self, state: ForwardState, step: Step, b: Linear) -> None:
        super().__init__(state, step, b)
        self._flat, self._field = b.x.dim() == 2, "self" if b.bias is None else "mat1"

    def fits(self, x: Any, weight: Any, bias: Any) -> bool:
        native = type(weight) is Parameter and weight.requires_grad and (bias is None) == (self._field == "self")
        return native and self._x.fits(x)

    def __call__(self, state: ForwardState, x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
        y: Any = F.linear(x, weight, bias)
        node = y.grad_fn if self._flat else y.grad_fn.next_functions[0][0]
        saved = getattr(node, f"_saved_{self._field}", None)
        if saved is None:  # another product than expected
            return super().__call__(state, x, weight, bias)
        if not state.stays_as_it_is(saved, self.step.input):
            replace_saved(node, self._field, state.keep(saved, self.step.input))
        return y


class NativeBatchNorm(SpecialisedCall):
    """PyTorch's batch norm."""

    _kind: tuple | None = None
    """The input's kind, and the mode, in which a module's call was seen to be the planned one."""

    def at(self, state: ForwardState, module: Any, x: Any) -> torch.Tensor:
        own = module._parameters
        if state.bound and state.program is not None:
            kind = x.dtype, x.shape, x.stride(), module.training
            if kind != self._kind:
                of_batch = module.training or module.running_mean is module.running_var is None
                bound = BatchNorm(x, None, None, own["weight"], own["bias"], of_batch, module.momentum, module.eps)
                check_call(state.program, self.step.index, bound)
                self._kind = kind
        y = type(module).forward(module, x)
        if keeps_its_input(y):
            self.replace(state, y, x, own["bias"], module.training)
        return y

    def __call__(
        self, state: ForwardState, x: torch.Tensor, running_mean: Any, running_var: Any, weight: Any, bias: Any,
        training: bool, momentum: float, eps: float,
    ) -> torch.Tensor:  # fmt: skip
        y: Any = F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        if keeps_its_input(y):
            self.replace(state, y, x, bias, training)
        return y

    def replace(self, state: ForwardState, y: Any, x: torch.Tensor, bias: Any, training: bool) -> None:
        """Have y's node keep its input as planned, and record a batch norm of batch statistics for rebuilds."""
        step, decision = self.step, self.step.input
        kept: Kept | None = None
        if not state.stays_as_it_is(x, decision):
            kept = state.keep(x, decision)
            replace_saved(y.grad_fn, "input", kept)
        if step.feeds_recipe and training:
            replaced = kept is not None and type(kept) is not SavedAsIs
            where = geometry_of(x) if replaced else None
            state.norms[step.index] = NormSource(y.grad_fn, bias, kept if replaced else None, where)
