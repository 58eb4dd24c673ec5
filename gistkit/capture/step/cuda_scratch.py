"""What CUDA's operators hold inside, beside operands and results."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import torch

_aten = torch.ops.aten
_SUMS = (_aten.sum.dim_IntList, _aten.mean.dim)
_ATTENTION_BACKWARD = (
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    _aten._scaled_dot_product_efficient_attention_backward.default,
)
_SORTED = {_aten.index_put: 48, _aten.embedding_dense_backward: 40}
"""Operators that sort indices, with the bytes that they take for each."""
_SORTED_WHERE_DETERMINISTIC = {_aten.scatter_add: 48, _aten.scatter_add_: 48}
_THREADS, _WARP, _PER_PROCESSOR = 512, 32, 2048
_LEAST, _MOST = 16, 256  # values that a thread sums


def scratch_bytes(func: Any, args: tuple, out: Any) -> int:
    """Of an operator's call with result ``out``; measured on an H200 with torch 2.11."""
    if func in _ATTENTION_BACKWARD:  # a map of fp32 as large as the queries
        return 4 * args[1].numel()
    if func is _aten._softmax_backward_data.default:  # the gradient times the probabilities
        return args[0].numel() * args[0].element_size()
    kind = func.overloadpacket
    each = _SORTED.get(kind, 0)
    if not each and torch.are_deterministic_algorithms_enabled():
        each = _SORTED_WHERE_DETERMINISTIC.get(kind, 0)
    return each * _indices(kind, args) if each else partial_bytes(func, args, out)


def _indices(kind: Any, args: tuple) -> int:
    """How many an operator sorts."""
    if kind is _aten.embedding_dense_backward:
        return args[1].numel()
    if kind is not _aten.index_put:
        dim, places = args[1], args[2]
        # expanded in all dimensions but ``dim``
        one_row = places.numel() and places.dim() and not any(places.select(dim, 0).stride())
        return places.shape[dim] if one_row else places.numel()
    given = [i for i in args[1] if i is not None]
    return torch.broadcast_shapes(*(i.shape for i in given)).numel() if args[3:4] == (True,) else 0


def partial_bytes(func: Any, args: tuple, out: Any) -> int:
    """What a sum or a mean holds for partial results: a buffer where the outputs, not what is summed, lie side by side,
    as in a bias's gradient. PyTorch makes it larger than needed: 132 MiB for (16384, 3072). Port of ``setReduceConfig``
    (``aten/src/ATen/native/cuda/Reduce.cuh``, torch 2.11). 0 for other operators."""
    if func not in _SUMS or len(args) < 2 or not args[1] or not args[0].numel():
        return 0
    x, dims = args[0], {d % args[0].dim() for d in args[1]}
    summed, others = ([d for d in _by_stride(x) if (d in dims) is found] for found in (True, False))
    if not summed or not others or x.stride(others[0]) > x.stride(summed[0]):
        return 0
    side = x.shape[others[0]]
    for near, far in pairwise(others):
        if x.stride(far) != x.stride(near) * x.shape[near]:
            break
        side *= x.shape[far]
    vector = 1
    if x.stride(others[0]) == 1:
        steps = (x.stride(d) for d in (*summed, *others[1:]) if x.stride(d) >= side)
        vector = next(n for n in (4, 2, 1) if not any(size % n for size in (side, x.storage_offset(), *steps)))
    outputs = prod(x.shape[d] for d in others)
    width = max(out.element_size(), 4)
    return width * outputs * _threads_beside(outputs, x.numel() // outputs, vector)


def _threads_beside(outputs: int, inputs: int, vector: int) -> int:
    """Partial results that there is room for, for each output of ``inputs`` values; 0 where one block sums them."""
    most = _THREADS // vector
    across, along = (min(_power_of_2(n), most) for n in (outputs // vector, inputs))
    width = min(across, _WARP)
    height = min(along, most // width)
    width = min(across, most // height)
    if inputs < min(height * 16, _MOST):
        return 0
    each, blocks = -(-inputs // height), -(-outputs // vector // width)
    room = _processors() * (_PER_PROCESSOR // (width * height))
    if each < _MOST or blocks > room:
        return 0
    parts = max(min(-(-room // blocks), -(-each // _LEAST)), -(-each // _MOST))
    return parts * width * vector if parts > 1 else 0


def _by_stride(x: torch.Tensor) -> list[int]:
    return sorted((d for d in range(x.dim()) if x.shape[d] > 1), key=x.stride)


def _power_of_2(n: int) -> int:
    return 1 << max(n, 1).bit_length() - 1


def _processors() -> int:
    """Of the GPU that is there, else of an H100."""
    return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 132
