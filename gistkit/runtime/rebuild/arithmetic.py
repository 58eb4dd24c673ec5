"""Which arithmetic a device's batch norm has for tensors of one kind, found by trying all on drawn tensors.

The arithmetics of :func:`gistkit.nn.norm.rebuild_candidates` differ in single roundings, and a network's own data do
not always show which it is: with means small beside the biases, bias - mean * alpha has the same bits with one rounding
and with two. It depends on the kind of tensor alone (shape, layout, dtype, device), so candidates are compared with
PyTorch's batch norm on drawn tensors of that kind whose means, weights and biases are of the order of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from gistkit.capture import batch_size
from gistkit.codecs import dtype_of
from gistkit.ir import part_bytes
from gistkit.nn.norm import CHANNELS_LAST, Rebuild, rebuild_candidates
from gistkit.runtime.program.program import Program
from gistkit.runtime.stash.verify import blocks, same_bits

# Arithmetics differ in about one element of ten in fp32, and after a rounding to bf16 in one of some 50,000, but for
# those that fp32 biases make nearly cancel.
ELEMENTS, ELEMENTS_16 = 2**12, 2**18
# A factor of a channel is rounded once for all its elements: so many channels are to have been asked.
CHANNELS = 64
ROUNDS = 64
DRAWN_SCALE = 256.0
"""Of weights drawn at random: what is left of rounding is then no subnormal in fp16, and a whole output no infinity."""


class Kind(NamedTuple):
    """What a batch norm's arithmetic depends on; ``affine``: the dtype of weight and bias (None: there are none)."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    affine: torch.dtype | None
    eps: float


def arithmetics(verified: dict, kind: Kind) -> list[Rebuild]:
    """The arithmetics that give the training batch norm of tensors of that kind bit for bit, remembered in
    ``verified``. A new one takes twice such a tensor's memory and synchronises; random states stay as they are."""
    key = ("arithmetics", *kind, torch._C._get_cudnn_enabled())
    if key not in verified:
        wide = torch.float32 in (kind.dtype, kind.affine)
        elements, numel = ELEMENTS if wide else ELEMENTS_16, torch.Size(kind.shape).numel()
        rounds = min(max(-(-elements // numel), -(-CHANNELS // kind.shape[1])), ROUNDS)
        exact = None
        with torch.no_grad():
            for seed in range(rounds):
                exact = _exact(exact, kind, seed)
        verified[key] = exact
    return verified[key]


def _exact(candidates: list[Rebuild] | None, kind: Kind, seed: int) -> list[Rebuild]:
    """Those of the candidates (None: all that are known) that give the batch norm of one drawn tensor."""
    generator, channels = torch.Generator().manual_seed(seed), kind.shape[1]

    def drawn() -> torch.Tensor:
        """Of the order of one, of either sign, never near zero."""
        size = torch.rand(channels, generator=generator) + 0.5
        return torch.where(torch.rand(channels, generator=generator) < 0.5, size, -size).to(kind.device)

    x = torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device=kind.device)
    x.normal_(generator=torch.Generator(kind.device).manual_seed(seed))
    x.add_(drawn().to(x.dtype).view((1, -1) + (1,) * (x.dim() - 2)))
    weight = bias = None

    def forward() -> tuple:
        cudnn = torch._C._get_cudnn_enabled()
        return torch._batch_norm_impl_index(x, weight, bias, None, None, True, 0.0, kind.eps, cudnn)[:3]

    if kind.affine is not None:
        weight = drawn().mul_(DRAWN_SCALE).to(kind.affine)
        bias = torch.zeros(channels, device=kind.device).to(kind.affine)
        mean, invstd = forward()[1:]
        bias.copy_(_cancelling(x, mean, invstd, weight))
    y, *stats = forward()
    known = rebuild_candidates(x) if candidates is None else candidates
    return [c for c in known if _gives(c, x, y, *stats, weight, bias)]


def _cancelling(x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Biases that leave next to nothing but rounding of one element a channel: there arithmetics differ in 16 bits."""
    first = x[(0, slice(None), *(0,) * (x.dim() - 2))]
    return (first.double() - mean.double()).mul_(invstd).mul_(weight).neg_()


def _gives(candidate: Rebuild, x: torch.Tensor, y: torch.Tensor, *vectors: torch.Tensor | None) -> bool:
    return all(
        same_bits(candidate(x[index], *(None if v is None else v[index[1]] for v in vectors)), y[index])
        for index in blocks(x, part_bytes(x.numel() * x.element_size()))
    )


def probe_ahead(verified: dict, program: Program, args: tuple, kwargs: dict) -> None:
    """:func:`arithmetics`, before a forward with these arguments, for every batch norm from which the program rebuilds:
    there is room for its tensors then."""
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not inputs:
        return
    rows, device = batch_size((args, kwargs)), inputs[0].device
    if (rows, device) not in program.norm_kinds:
        program.norm_kinds[rows, device] = tuple(dict.fromkeys(_kinds(program, rows, device)))
    for kind in program.norm_kinds[rows, device]:
        arithmetics(verified, kind)


def _kinds(program: Program, rows: int, device: torch.device) -> Iterator[Kind]:
    """The kinds of those batch norms, in either memory format, as weights may turn maps."""
    graph = program.graph
    for call in program.norms():
        x, *others = (graph.values[v] for v in call.operands)
        affine = next((dtype_of(v.dtype) for v in others if graph.storages[v.storage].kind == "parameter"), None)
        shape = (rows, *x.shape[1:]) if graph.batch and x.shape[0] == graph.batch else x.shape
        options: dict[str, Any] = call.options or {}
        for layout in dict.fromkeys((torch.contiguous_format, CHANNELS_LAST.get(len(shape), torch.contiguous_format))):
            stride = torch.empty(shape, device="meta", memory_format=layout).stride()
            yield Kind(tuple(shape), stride, dtype_of(x.dtype), device, affine, options["eps"])
