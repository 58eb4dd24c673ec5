"""The ways to run one training step that the step comparison sets beside each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

RUNS = 8


@dataclass(frozen=True)
class Variant:
    """``prepare`` gets the plain model, returns what is called; ``around`` (told if on a GPU) is open in the forward.

    ``bitwise``: the loss must equal plain PyTorch's in every bit.
    """

    name: str
    prepare: Callable[[nn.Module], Callable[..., Any]]
    around: Callable[[bool], AbstractContextManager] = lambda on_gpu: nullcontext()
    bitwise: bool = False


def _compressed(model: nn.Module, **settings: Any) -> nn.Module:
    import gistkit

    return gistkit.compress(model, **settings)


def checkpointed(model: nn.Module) -> Callable[..., Any]:
    """Recompute in backward: each residual block of a stage, each run of layers up to a max-pool of a chain, eight runs
    of a model that is one long sequence, each layer of a transformer and each module of a list."""
    if isinstance(model, nn.Sequential) and len(model) > RUNS:
        return lambda x: checkpoint_sequential(model, RUNS, x, use_reentrant=False)
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            vars(layer)["forward"] = partial(checkpoint, layer.forward, use_reentrant=False)
    _checkpoint_sequences(model)
    return model


def _checkpoint_sequences(model: nn.Module) -> None:
    """Checkpoint the sequences and lists among the model's children. Where there are none, as in a model that wraps
    another with its loss, those among the children's children."""
    sequences = [child for child in model.children() if isinstance(child, nn.Sequential | nn.ModuleList)]
    for sequence in sequences:
        if isinstance(sequence, nn.Sequential):
            parts = _segments(sequence)
            if len(parts) > 1:
                vars(sequence)["forward"] = partial(_run_segments, parts)
        else:
            for part in sequence:
                vars(part).setdefault("forward", partial(checkpoint, part.forward, use_reentrant=False))
    for child in () if sequences else model.children():
        _checkpoint_sequences(child)


def _segments(sequence: nn.Sequential) -> list[nn.Module]:
    layers = list(sequence)
    if all(any(True for _ in layer.children()) for layer in layers):
        return layers
    cuts = [i + 1 for i, layer in enumerate(layers) if isinstance(layer, nn.MaxPool2d)]
    bounds = sorted({0, *cuts, len(layers)})
    return [nn.Sequential(*layers[a:b]) for a, b in pairwise(bounds)] if cuts else []


def _run_segments(parts: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for part in parts:
        y = checkpoint(part, x, use_reentrant=False)
        assert isinstance(y, torch.Tensor)
        x = y
    return x


def _save_on_cpu(on_gpu: bool) -> AbstractContextManager:
    return torch.autograd.graph.save_on_cpu(pin_memory=on_gpu)


def _same(model: nn.Module) -> nn.Module:
    return model


VARIANTS = {
    v.name: v
    for v in (
        Variant("plain", _same, bitwise=True),
        Variant("compile", torch.compile),
        Variant("checkpoint", checkpointed),
        Variant("save_on_cpu", _same, _save_on_cpu),
        Variant("gistkit", _compressed, bitwise=True),
        Variant("gistkit fp8", partial(_compressed, lossy="fp8")),
        Variant("gistkit fp8s", partial(_compressed, lossy="fp8s")),
    )
}
