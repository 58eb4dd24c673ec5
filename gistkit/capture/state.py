"""The parameters and buffers of a model, as data."""

from __future__ import annotations

import torch

from gistkit.ir import StateTensor


def state_of(model: torch.nn.Module) -> tuple[StateTensor, ...]:
    """A model's parameters and buffers, each object once, in the order of its modules. Touches no values."""
    named = (*model.named_parameters(), *model.named_buffers())
    return tuple(
        StateTensor(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.requires_grad) for name, t in named
    )
