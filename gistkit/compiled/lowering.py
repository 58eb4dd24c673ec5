"""Rules by which Inductor compiles the operators of :mod:`gistkit.compiled.operators`, given Inductor's own values."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch

from gistkit.compiled import compat
from gistkit.errors import CompileError
from gistkit.formats import SCALE_BLOCK

SCALES = "gistkit_scales"  # in the meta of an operator that finds the largest of each 128 elements


def materialised(x: Any, after: Any, strides: Any = None) -> Any:
    """x becomes a buffer, fused with nothing and computed behind ``after``."""
    graph, ir = compat.part("V").graph, compat.part("ir")
    first = len(graph.operations)
    after.realize()
    begin = len(graph.operations)
    if strides is not None:
        x = ir.ExternKernel.require_exact_strides(x, strides, allow_padding=True)
    x.realize()
    name = after.get_name()
    for operation in graph.operations[begin:]:
        if operation.get_operation_name() is not None and operation.get_name() != name:
            graph.additional_buffer_deps[operation.get_operation_name()].add(name)
    if len(graph.operations) > first and hasattr(graph, "no_fuse_buffer_names"):
        graph.no_fuse_buffer_names.add(x.get_name())
        graph.gistkit_apart = getattr(graph, "gistkit_apart", type(graph.no_fuse_buffer_names)()) | {x.get_name()}
    return x


def written(x: Any) -> Any:
    """x becomes a buffer as any other, in the layout that Inductor gives to what forward saves."""
    graph, ir = compat.part("V").graph, compat.part("ir")
    node = graph.current_node
    rounded = node.args[0].target is torch.ops.gistkit.rounded.default  # laid out as what torch.compile saves
    strides = (node.args[0].args[0] if rounded else node.args[0]).meta["val"].stride()
    if len(strides) == 4 and node.args[0] in graph.nodes_prefer_channels_last:
        strides = ir.FlexibleLayout.stride_ordered_for_memory_format(x.get_size(), torch.channels_last)
    if strides and 0 not in strides and all(isinstance(s, int) for s in strides):  # an expanded view stays one
        x = ir.ExternKernel.require_exact_strides(x, strides, allow_padding=True)
    x.realize()
    return x


def moment(x: Any, count: float) -> Any:
    """The one buffer that the variance x is computed from. Raises CompileError where Inductor has it otherwise."""
    graph, ir = compat.part("V").graph, compat.part("ir")
    quotient = x.data.data
    reads = {read.name for read in quotient.get_reads()} if isinstance(quotient, ir.Pointwise) else set()
    found = graph.get_buffer(reads.pop()) if len(reads) == 1 else None
    if found is None:
        raise CompileError(
            f"compile: a variance must be a quotient of one buffer of Inductor's, as in torch {compat.RELEASES}; got "
            f'{type(quotient).__name__} in torch {torch.__version__}; pass fidelity="reassociated"'
        )
    return ir.TensorBox.create(found)


def _pointwise(x: Any, made: Callable[[Any, Callable[[], Any], torch.dtype], Any]) -> Any:
    """``made(ops, what loads x, dtype)`` of each element."""
    ops, load, dtype = compat.part("ops"), x.make_loader(), x.get_dtype()
    pointwise = compat.part("ir").Pointwise
    words = {"device": x.get_device(), "dtype": dtype, "ranges": x.get_size()}
    return pointwise.create(inner_fn=lambda index: made(ops, lambda: load(index), dtype), **words)


def variance(x: Any, count: float) -> Any:
    """Inductor's own variance: the moment x over a constant."""
    return _pointwise(x, lambda ops, load, dtype: load() / ops.constant(count, dtype))


def rounded(x: Any) -> Any:
    """x is rounded to its own dtype where kernels compute in a wider one."""
    return _pointwise(x, lambda ops, load, to: ops.to_dtype(ops.to_dtype(load(), to, use_compute_types=False), to))


def short(x: Any, once: bool = False) -> Any:
    """x; all that it is computed by counts as one operation and one read where Inductor chooses buffers, with ``once``
    also where several read x."""

    def made(ops: Any, load: Callable[[], Any], dtype: torch.dtype) -> Any:
        counts = getattr(compat.part("V").get_ops_handler(), "__dict__", {})  # getattr warns
        before = {name: counts[name] for name in ("op_count", "_nontrivial_read_count") if name in counts}
        read = counts.get("_read_names", [])
        first, loaded = len(read), load()
        counts.update({name: min(count + 1, counts[name]) for name, count in before.items()})
        del read[first + 1 if once else len(read) :]
        return loaded

    return _pointwise(x, made)


def saturated(x: Any) -> Any:
    """x as float8: the conversion of a GPU saturates (PTX ``cvt.rn.satfinite``)."""
    return compat.part("lowerings")[torch.ops.prims.convert_element_type.default](x, torch.float8_e4m3fn)


def bounded(x: Any, most: float) -> Any:
    """x between -most and most in one instruction, which GPUs have from sm_86 on; Inductor writes four."""
    words = {"asm": f"min.NaN.xorsign.abs.f32 $0, $1, 0f{struct.pack('>f', most).hex()};", "constraints": "=f,f"}
    return _pointwise(x, lambda ops, load, dtype: ops.inline_asm_elementwise(load(), dtype=dtype, **words))


def scale_blocks(features: Any) -> dict[str, int] | None:
    """The block sizes of a kernel that only finds the largest of each 128 elements, for a scaled form: 16 elements a
    thread, 8 where it reads several tensors. Eight warps where it reads one row for all rows, as a bias: four would get
    that row's layout from Triton (VGG-16's largest then takes 974 us in place of 504; docs/log.md)."""
    if {any(SCALES in at.meta for at in node.node.get_origins()) for node in features.reduction_nodes()} != {True}:
        return None
    graph, ends = compat.part("V").graph, [node.read_writes for node in features.scheduler_nodes()]
    written = {dep.name for end in ends for dep in end.writes}
    sizes = [graph.get_numel(name) for name in {dep.name for end in ends for dep in end.reads} - written]
    if any(graph.sizevars.statically_known_lt(size, SCALE_BLOCK + 1) for size in sizes):
        return {"XBLOCK": 16, "num_warps": 8}
    return {"XBLOCK": 8 if sizes.count(features.numel * SCALE_BLOCK) > 1 else 16, "num_warps": 4}


def pooled_by_pytorch(
    gradient: Any, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, offsets: Any, same: bool
) -> Any:
    """PyTorch's own gradient of a max-pool, of tensors or of Inductor's values."""
    made: list[Any] = [torch.ops.prims._low_memory_max_pool_offsets_to_indices.default,
                       torch.ops.aten.max_pool2d_with_indices_backward.default]  # fmt: skip
    if not isinstance(x, torch.Tensor):
        made = [compat.part("lowerings")[operator] for operator in made]
    size = x.shape[-2:] if isinstance(x, torch.Tensor) else x.get_size()[-2:]
    indices = made[0](offsets, kernel, size, stride, padding, dilation)
    return made[1](gradient, x, kernel, stride, padding, dilation, ceil, indices)


def pooled(
    gradient: Any, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, offsets: Any, same: bool
) -> Any:
    """The gradient of a max-pool with Inductor's sum, order and layout. An element takes the gradients of the windows
    over it whose offset is its own place in the window. Inductor makes a place in the image of each offset, and clamps
    windows beyond the edge, in some hundred operations; here such windows are not loaded. No window over an element
    may have an index below 0, so ``padding >= kernel - stride``.

    ``same``: Inductor is to make the buffers that it makes of its own gradient, which has more operations. It writes
    every gradient in channels_last to one; for another layout its own gradient is taken."""
    gradient.realize_hint()
    strides = x.maybe_get_stride(), gradient.maybe_get_stride()
    channels_last = any(each is not None and each[1] == 1 for each in strides)
    if same and not channels_last:
        return pooled_by_pytorch(gradient, x, kernel, stride, padding, dilation, ceil, offsets, same)
    ir, ops = compat.part("ir"), compat.part("ops")
    division = compat.part("FloorDiv")
    known_less = compat.part("V").graph.sizevars.statically_known_lt
    offset_at, gradient_at = offsets.make_loader(), gradient.make_loader()
    sizes, counts = x.get_size()[-2:], gradient.get_size()[-2:]

    def number(value: Any) -> Any:
        return ops.index_expr(value, torch.int32)

    def windows(dim: int, at: Any) -> list[tuple[Any, list[Any], Any]]:
        """Those over a place of a dimension, and at the edges more: index, what holds if it is one, place in it."""
        k, s, at, end = kernel[dim], stride[dim], at + padding[dim], sizes[dim] - 1 + padding[dim]
        made = []
        for i in range(-(-k // s)):
            window, holds = division(at - k + s, s) + i, []
            if i >= k // s:
                holds.append(ops.le(number(window), number(division(at, s))))
            if not any(known_less(most, counts[dim]) for most in (division(end - k + s, s) + i, division(end, s))):
                holds.append(ops.lt(number(window), number(counts[dim])))
            made.append((window, holds, number(at - window * s)))
        return made

    def made(index: Any) -> Any:
        *before, row, column = index
        total = None
        for up, above, down in windows(0, row):
            for left, beside, right in windows(1, column):
                window, holds = [*before, up, left], [*above, *beside]
                offset, part = partial(offset_at, window), partial(gradient_at, window)
                if holds:
                    there = reduce(ops.and_, holds)
                    offset, part = partial(ops.masked, there, offset, -128), partial(ops.masked, there, part, 0.0)
                own = ops.add(ops.mul(down, ops.constant(kernel[1], torch.int32)), right)
                taken, share = ops.eq(ops.to_dtype(offset(), torch.int32), own), part()
                if total is None:
                    total = ops.where(taken, share, ops.constant(0.0, torch.float32))
                else:
                    total = ops.where(taken, ops.add(total, share), total)
        return total

    described = {"device": gradient.get_device(), "dtype": gradient.get_dtype(), "ranges": x.get_size()}
    out = ir.Pointwise.create(inner_fn=made, **described)
    return ir.ExternKernel.require_channels_last(out) if channels_last else out


def convolved(x: Any, weight: Any, stride: Any, padding: Any, dilation: Any, groups: Any) -> Any:
    """A convolution without bias, of tensors or of Inductor's values."""
    made: Any = torch.ops.aten.convolution.default
    if not isinstance(x, torch.Tensor):
        made = compat.part("lowerings")[made]
    return made(x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups)
