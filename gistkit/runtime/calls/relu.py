"""ReLU: how its output comes back in backward, and what its own node keeps.

| plan | node | keeps |
|---|---|---|
| output dense | PyTorch's | the output |
| output rebuilt or coded, its readers leave room | PyTorch's | nothing of its own: the values that its readers share |
| output rebuilt or coded, no room | gistkit's | a 1-bit mask beside a rebuilt output, else the shared stash |
| values read by nobody | gistkit's | a 1-bit mask |
| the max-pool behind it carries the mask | gistkit's | nothing |
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gistkit.capture import Relu
from gistkit.codecs import CODECS
from gistkit.ir import OPERATORS, STAY, Decision, zeros_left_out
from gistkit.kernels import Masks, is_dense
from gistkit.nn import relu as relu_op
from gistkit.nn.eligible import overwritable
from gistkit.runtime.calls.kinds import SpecialisedCall, TensorKind
from gistkit.runtime.forward.deferred_mask import DeferredMask
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.program.program import KEEP_DENSE, Step
from gistkit.runtime.rebuild.terms import Exactness, Recipe
from gistkit.runtime.stash.stash import RebuiltBody

NOT_EXACT = "it cannot be rebuilt bit for bit on this device"
MADE_OTHERWISE = "the forward made it in another way than when it was captured"


def specialised_relu(state: ForwardState, step: Step, b: Relu) -> SpecialisedCall:
    """How a ReLU of such an operand runs as planned."""
    x, decision = b.x, step.output
    kind: type[_ReluCall]
    if not x.requires_grad or x.numel() == 0 or (b.inplace and not (overwritable(x) and is_dense(x))):
        kind = PlainRelu
    elif decision is None or not decision.form.values:
        defers = decision is not None and decision.form.gone and step.choice.mask_in_pool and is_dense(x)
        kind = DeferredRelu if defers else MaskedRelu
    elif decision.form.returns == OPERATORS:
        kind = RebuiltRelu
    elif decision.mask:
        kind = MaskedRelu
    else:
        kind = PlainRelu if decision.stays else StashedRelu
    return kind(state, step, b)


class _ReluCall(SpecialisedCall):
    def __init__(self, state: ForwardState, step: Step, b: Relu) -> None:
        self.step, self.fits = step, TensorKind(b.x, b.inplace).fits

    def at(self, state: ForwardState, module: Any, x: Any) -> torch.Tensor | None:
        inplace = module.inplace
        return self(state, x, inplace) if self.fits(x, inplace) else None


class PlainRelu(_ReluCall):
    """PyTorch's own ReLU, whose output stays as it is."""

    def __call__(self, state: ForwardState, x: torch.Tensor, inplace: bool) -> torch.Tensor:
        y = torch.relu_(x) if inplace else torch.relu(x)
        if y.requires_grad:
            decision = self.step.output or KEEP_DENSE
            state.mark_sparse(y)
            if decision.form.returns == STAY and not (decision.storage < 0 and state.program is not None):
                if not state.stays_as_it_is(y, decision):
                    state.alias(y, decision)
            elif decision.form.returns != STAY and not decision.form.gone:
                state.cannot(decision, "PyTorch's own op ran, for these operands are not ones that gistkit's takes")
        return y


class MaskedRelu(_ReluCall):
    """A node that keeps a 1-bit mask; its output's values are kept for others as decided, or read by nobody."""

    def __init__(self, state: ForwardState, step: Step, b: Relu) -> None:
        super().__init__(state, step, b)
        self._masks = Masks(b.x) if is_dense(b.x) else None

    def __call__(self, state: ForwardState, x: torch.Tensor, inplace: bool) -> torch.Tensor:
        step, decision = self.step, self.step.output
        y = relu_op.run(x, inplace) if self._masks is None else relu_op.masked(x, inplace, self._masks)
        if decision is not None and step.choice.mask_in_pool:
            state.cannot(decision, "the tensor has gaps, and the ReLU keeps a mask of its own")
        node: Any = y.grad_fn
        if decision is not None and decision.on_host:
            node.kept = state.away(node.kept, x.device, decision)
        state.record_own(step.index, step.op, node.kept)
        state.mark_sparse(y)
        if decision is not None and decision.mask:
            state.encode(y, decision)
        return y


class DeferredRelu(_ReluCall):
    """A node whose mask the max-pool behind it carries, should that be the next covered call."""

    def __call__(self, state: ForwardState, x: torch.Tensor, inplace: bool) -> torch.Tensor:
        mask = DeferredMask(state.program)
        y = relu_op.run(x, inplace, lambda _: mask)  # type: ignore[arg-type]
        state.record_own(self.step.index, self.step.op, mask)
        state.mark_sparse(y)
        state.deferred = y, mask
        return y


class StashedRelu(_ReluCall):
    """One stash serves the ReLU's backward and every later reader of its output."""

    def __init__(self, state: ForwardState, step: Step, b: Relu) -> None:
        super().__init__(state, step, b)
        # a rounded value may be zero where the ReLU's was not
        exact = step.output is not None and not step.output.on_host and not step.output.form.rounds_to
        self._shares = exact and step.output.codec in CODECS and state.has_room(step.index, b.x)  # type: ignore[union-attr]

    def __call__(self, state: ForwardState, x: torch.Tensor, inplace: bool) -> torch.Tensor:
        y = self._shared(state, x, inplace) if self._shares else self._own(state, x, inplace)
        state.mark_sparse(y)
        return y

    def _shared(self, state: ForwardState, x: torch.Tensor, inplace: bool) -> torch.Tensor:
        y = torch.relu_(x) if inplace else torch.relu(x)
        decision: Any = self.step.output
        body = state.body(y, decision)
        if body is None:
            state.alias(y, decision)
        else:
            state.stash(y, body, decision, y.grad_fn)
        return y

    def _own(self, state: ForwardState, x: torch.Tensor, inplace: bool) -> torch.Tensor:
        decision: Any = self.step.output
        y = relu_op.run(x, inplace, partial(state.keep, decision=decision))
        # only now is y's node known
        if state.is_source(decision.storage):
            state.nodes[decision.storage] = y.grad_fn
        return y


class RebuiltRelu(MaskedRelu):
    """A ReLU whose output comes back from what batch norms keep, once that has given the forward's own bits."""

    def __init__(self, state: ForwardState, step: Step, b: Relu) -> None:
        super().__init__(state, step, b)
        # what starts from rounded values may be zero where the ReLU's output was not
        self._shares = state.settings.lossy is None and state.has_room(step.index, b.x)
        self._version, self._nbytes = b.x._version, b.x.numel() * b.x.element_size()
        self._recipe: Recipe | None = None

    def __call__(self, state: ForwardState, x: torch.Tensor, inplace: bool) -> torch.Tensor:
        node, as_made, recipe = x.grad_fn, x._version == self._version, self._recipe
        decision: Any = self.step.output
        body = recipe.body(node, state.norms, state.kept_by) if recipe is not None and as_made else None
        if self._shares:
            y = torch.relu_(x) if inplace else torch.relu(x)
        else:
            y = relu_op.run(x, inplace) if self._masks is None else relu_op.masked(x, inplace, self._masks)
            state.record_own(self.step.index, self.step.op, y.grad_fn.kept)  # type: ignore[union-attr]
        # of a dense x, as its kind says, y is dense as well
        gaps = self._masks is None and not is_dense(y)
        if gaps or y.storage_offset() or y.untyped_storage().nbytes() != self._nbytes:
            body = None
        elif body is None and as_made:
            body = self._found(state, y, node)
        if body is None:
            self._store(state, y, NOT_EXACT if as_made and self._recipe is None else MADE_OTHERWISE)
            return y
        state.stash(y, body, decision, y.grad_fn if self._shares else None)
        if state.probing:
            state.mark_sparse(y)
        return y

    def _found(self, state: ForwardState, y: torch.Tensor, node: Any) -> RebuiltBody | None:
        """What rebuilds y, checked now or, under a budget, at its first use; None where nothing does."""
        decision: Any = self.step.output
        bind = lambda recipe: recipe.body(node, state.norms, state.kept_by)  # noqa: E731
        exactness = Exactness(state.verified, self.step.index, decision.recipe, y, bind)
        if not exactness.recipes:
            return None
        if state.settings.lossy is not None:  # what starts from rounded values does not give the forward's bits
            self._recipe = exactness.recipes[0]
            return bind(self._recipe)
        if state.bound and not exactness.known:
            return exactness.later(lambda: state.cannot(decision, NOT_EXACT))
        self._recipe = exactness.check()
        return None if self._recipe is None else bind(self._recipe)

    def _store(self, state: ForwardState, y: torch.Tensor, why: str) -> None:
        """Keep y's values after all."""
        decision: Any = self.step.output
        state.cannot(decision, why)
        program, lossy = state.program, state.settings.lossy
        lossy = lossy if program is None or program.bears_rounding(decision.storage) else None
        instead = Decision(decision.storage, zeros_left_out(lossy), reason=f"stored: {why}")
        if not self._shares:
            state.encode(y, instead)
            return
        body = state.body(y, instead)
        if body is not None:
            state.stash(y, body, instead, y.grad_fn)
