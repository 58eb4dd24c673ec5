"""conv2d whose backward takes the weight gradient first and lets go of its input before the input gradient.

Two calls of the library cost the host more than one, 51 us each (ResNet-50, batch 64, H200).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from gistkit.capture import hooks_are_active, takes_conv2d
from gistkit.kernels import conv_task, run_engine_plan
from gistkit.nn.autocast import cast
from gistkit.nn.eligible import covered, recorded
from gistkit.nn.keep import Keep, apply, keep_dense, once_differentiable, take
from gistkit.nn.pool import Size, pair
from gistkit.nn.standin import Geometry, StandIn


@dataclass
class Prepared:
    """One call for operands of one kind: its geometry, the padding of its input beforehand where that is uneven (left,
    right, top, bottom), the stand-in for its input. ``engines``: by part (``forward``, ``weight``, ``input``) the
    engine of cuDNN that runs it in place of PyTorch's own choice; ``channels_last``: the memory format, once known."""

    geometry: Geometry
    uneven: tuple[int, int, int, int] | None
    stand_in: StandIn | None = None
    engines: Mapping[str, str] = field(default_factory=dict)
    channels_last: bool = False

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The convolution, by PyTorch or an engine."""
        if self.engines:
            self.channels_last = self.geometry.memory_format(x, weight) is torch.channels_last
        if "forward" not in self.engines:
            return torch.conv2d(x, weight, bias, *self.geometry)
        y = self._by_engine("forward", x.shape, weight.shape, x, weight)
        return y if bias is None else y.add_(bias.view(1, -1, 1, 1))

    def weight_gradients(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, needs: tuple[bool, bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Those of weight and bias, each None where it is not needed."""
        if "weight" not in self.engines:
            return self.geometry.backward(grad, x, weight, (False, *needs))[1:]
        made = self._by_engine("weight", x.shape, weight.shape, x, grad) if needs[0] else None
        return made, grad.sum((0, 2, 3)) if needs[1] else None

    def input_gradient(self, grad: torch.Tensor, shape: torch.Size, weight: torch.Tensor) -> torch.Tensor:
        """By an engine, which does not ask for the input."""
        return self._by_engine("input", shape, weight.shape, grad, weight)

    def _by_engine(self, part: str, x: torch.Size, weight: torch.Size, *operands: torch.Tensor) -> torch.Tensor:
        kind = operands[0].dtype, operands[0].device
        task = conv_task(part, x, weight, self.geometry[:3], *kind, self.channels_last)
        return run_engine_plan(task, self.engines[part], *operands)


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, call: Prepared, keep: Keep) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        with torch._C._DisableAutocast():
            y = call.forward(x, weight, bias)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if needs_x and call.stand_in is None:
            by_engine = "input" in call.engines
            call.stand_in = StandIn.unread(x) if by_engine else StandIn.of(x, weight, call.geometry)
        stand_in = call.stand_in if needs_x else None
        read = needs_weight or needs_bias or (stand_in is not None and stand_in.needs_input)
        ctx.save_for_backward(weight)
        ctx.kept = (keep(x) if read else None, stand_in, call)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):
        kept, stand_in, call = take(ctx)
        (weight,) = ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad[:3]
        x = grad_x = grad_weight = grad_bias = None
        if any(needs):
            x = kept.dense()
            grad_weight, grad_bias = call.weight_gradients(grad, x, weight, needs)
        if needs_x and stand_in.needs_input:
            x = kept.dense() if x is None else x
        elif needs_x:
            x = kept = None
            if "input" in call.engines:
                return call.input_gradient(grad, stand_in.shape, weight), grad_weight, grad_bias, None, None
            x = stand_in.tensor(weight, call.geometry)
        if needs_x:
            grad_x = call.geometry.backward(grad, x, weight, (True, False, False))[0]
        return grad_x, grad_weight, grad_bias, None, None


def prepare(x: torch.Tensor, weight: torch.Tensor, options: tuple) -> Prepared | None:
    """A call with ``options`` (stride, padding, dilation, groups), for all operands of the same dtypes, shapes, strides
    and devices under the same settings and autocast; None where PyTorch's own conv2d must run."""
    stride, padding, dilation, groups = options
    step, spread, uneven = pair(stride), pair(dilation), None
    if not takes_conv2d(x, weight) or step is None or spread is None or type(groups) is not int:
        return None
    around = (0, 0) if padding == "valid" else pair(padding)
    if padding == "same" and step == (1, 1):
        height, width = (d * (k - 1) for d, k in zip(spread, weight.shape[2:], strict=True))
        around = height // 2, width // 2
        uneven = (0, width % 2, 0, height % 2) if height % 2 or width % 2 else None
    return None if around is None else Prepared(Geometry(step, around, spread, groups), uneven)


def carry_out(
    call: Prepared, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, keep: Keep
) -> torch.Tensor:
    """The prepared call on such operands. ``keep`` makes the hold on x."""
    x, weight, bias = cast("conv2d", "cuda" if x.is_cuda else "cpu", x, weight, bias)
    x = x if call.uneven is None else F.pad(x, call.uneven)
    batch = x if x.dim() == 4 else x.unsqueeze(0)
    y = apply(_Conv2d, batch, weight, bias, call, keep)
    return y if x.dim() == 4 else y.squeeze(0)


def again(call: Prepared, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The prepared call's forward once more, of the same bits; no gradients."""
    x, weight, bias = cast("conv2d", "cuda" if x.is_cuda else "cpu", x, weight, bias)
    with torch._C._DisableAutocast():
        return call.forward(x, weight, bias)


def conv2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    *,
    keep: Keep | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.conv2d``, bit for bit, that keeps its input as ``keep`` makes it (default: the tensor,
    or whatever the saved-tensor hooks in force make of it).

    input: [N, C, H, W] or [C, H, W]; weight: [O, C/groups, KH, KW]; bias: [O] or None; fp32, bf16 or fp16; any other
    dtype is PyTorch's own op. ``keep``: a callable tensor -> Kept. Nothing of the input is kept where neither weight
    nor bias needs a gradient. Backward decodes it, takes the weight and bias gradients, lets go of it, then takes the
    input gradient. Under torch.autocast the operands are cast as PyTorch casts them
    (:func:`gistkit.nn.autocast.cast`). Raises what ``torch.conv2d`` raises. Does not synchronise.
    """
    options = (stride, padding, dilation, groups)
    call = None
    if covered(input, weight, bias) and recorded(input, weight, bias) and not (keep is None and hooks_are_active()):
        call = prepare(input, weight, options)
    if call is None:
        return F.conv2d(input, weight, bias, *options)  # type: ignore[arg-type]
    return carry_out(call, input, weight, bias, keep or keep_dense)
