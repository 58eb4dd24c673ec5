"""The private names of PyTorch that the compiled path uses, in one place.

They hold for torch 2.11 to 2.13. :func:`private` finds one, or raises CompileError, which names the release at hand.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import cache, partial, reduce
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from gistkit.errors import CompileError

RELEASES = "2.11 to 2.13"
Graphs = tuple[fx.GraphModule, fx.GraphModule]
NOT_CHECKED = "saved_tensor_with_no_vc_check"
"""In the ``meta`` of a saved tensor that autograd does not check the version of."""


def private(module: str, name: str) -> Any:
    """The private name ``module.name`` of PyTorch. Raises CompileError where this release has none."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CompileError(
            f"compile: {module}.{name} must exist, as in torch {RELEASES}; torch {torch.__version__} has none; install "
            "one of these releases, or train with gistkit.compress(model), which needs no compiler"
        ) from error


def partitioner_base() -> type:
    """``CustomPartitionerFn``: what Inductor calls in place of its own partitioner."""
    return private("torch._inductor.custom_graph_pass", "CustomPartitionerFn")


def min_cut(joint: fx.GraphModule, inputs: Any, **words: Any) -> Graphs:
    """PyTorch's own cut of the joint graph into forward and backward."""
    return private("torch._functorch.partitioners", "min_cut_rematerialization_partition")(joint, inputs, **words)


def inductor(graph: fx.GraphModule, inputs: Any, mode: str | None, options: dict[str, Any]) -> Any:
    """The graph compiled by Inductor under torch.compile's words ``mode`` and ``options``."""
    return private("torch", "_TorchCompileInductorWrapper")(mode, options, None)(graph, inputs)


@cache
def operators() -> Any:
    """The partitioner's table of operators: ``is_view(node)``, ``is_fusible(node)``, ``is_compute_intensive(node)``."""
    return private("torch._functorch.partitioners", "get_default_op_list")()


def fake_mode(values: Iterable[Any]) -> Any:
    """The mode of fake tensors that the first fake one of these belongs to."""
    kind = private("torch._subclasses.fake_tensor", "FakeTensor")
    found = next((v for v in values if isinstance(v, kind)), None)
    if found is None:
        raise CompileError(f"compile: graph nodes must carry fake tensors, found none (torch {torch.__version__})")
    return found.fake_mode


def outside_of_modes() -> Any:
    """In it operators run on real tensors, though a graph of fake ones is being traced."""
    return private("torch.utils._python_dispatch", "_disable_current_modes")()


def free_symbols(values: Iterable[Any]) -> set:
    """The symbols that sizes of fake tensors, or symbolic numbers, are made of."""
    return set(private("torch.fx.experimental.symbolic_shapes", "free_symbols")(list(values)))


def symbol_nodes(graph: fx.Graph) -> dict[Any, fx.Node]:
    """Each symbol's node: the placeholder of a symbolic number."""
    return private("torch.fx.experimental.symbolic_shapes", "find_symbol_binding_fx_nodes")(graph)


def storage_key(value: torch.Tensor) -> int:
    """The identity of a fake tensor's storage."""
    return value.untyped_storage()._cdata


def hint(value: Any) -> int:
    """A number; of a symbolic one what it was when the graph was traced, 0 where it is not known before run time."""
    known = value if isinstance(value, int) else getattr(getattr(value, "node", None), "hint", None)
    return int(known or 0)


def saved_descriptor(index: int, checked: bool) -> Any:
    """AOTAutograd's description of saved value ``index``; ``checked``: its version is compared before backward."""
    name = "SavedForBackwardsAOTOutput" if checked else "SavedForBackwardsNoVcCheckAOTOutput"
    return private("torch._functorch._aot_autograd.descriptors", name)(index)


def tracing_context() -> Any:
    """What belongs to the graph that is being traced or compiled; None outside of both."""
    return private("torch._guards", "TracingContext").try_get()


def set_partitioner(made: Any, passes: dict[str, Any]) -> None:
    """Make a partitioner, and passes over Inductor's kernels where there are none, those of all compilations from now
    on. Raises CompileError where another partitioner is set."""
    config = importlib.import_module("torch._inductor.config")
    found = private("torch._inductor.config", "custom_partitioner_fn")
    if found is not None and type(found) is not type(made):
        raise CompileError(
            f"compile: torch._inductor.config.custom_partitioner_fn must be None for a compressed model, got {found!r};"
            " unset it, or call gistkit.restore(model)"
        )
    config.custom_partitioner_fn = made  # type: ignore[attr-defined]
    for name, run in passes.items():
        setattr(config, name, private(config.__name__, name) or run)


def frame() -> tuple[int, int]:
    """The number of the Python frame that is being compiled, -1 outside of Dynamo, and the part of it where
    DistributedDataParallel has Dynamo split the graph: a number for each, the same for the same part."""
    compile_id = private("torch._guards", "CompileContext").current_compile_id()
    found = getattr(compile_id, "frame_id", None)
    split = getattr(tracing_context(), "ddp_optimizer_ctx", None)
    return -1 if found is None else int(found), -1 if split is None else int(split.curr_bucket) + 1


def real_parameters(inputs: Iterable[Any]) -> list[torch.nn.Parameter]:
    """The parameters among a graph's inputs. The parts of a graph that was split for DistributedDataParallel have fake
    ones, in place of which those of the whole graph are found that they stand for."""
    given = [p for p in inputs if isinstance(p, torch.nn.Parameter)]
    context, mode = tracing_context(), getattr(given[0], "fake_mode", None) if given else None
    if context is None or mode is None:
        return given
    known = [t for t in context.tensor_to_context if isinstance(t, torch.nn.Parameter)]
    stands_for = {id(mode.fake_tensor_converter._get_memo(p)): p for p in known}
    return [stands_for[id(p)] for p in given if id(p) in stands_for]


def emulates_casts(saved: bool = False) -> bool:
    """Whether Inductor is told to round every value of bf16 or fp16 where it is made; ``saved``: whether it rounds a
    saved one for its readers in forward too, as torch 2.13 does."""
    if not saved:
        return bool(private("torch._inductor.config", "emulate_precision_casts"))
    return bool(getattr(private("torch._inductor", "config"), "emulate_precision_casts_on_saved_tensors", False))


def prefers_channels_last(graph: fx.GraphModule) -> bool:
    """Whether Inductor will lay out the images of a forward graph as channels_last."""
    return bool(private("torch._inductor.graph", "GraphLowering").decide_layout_opt(graph, is_inference=False))


def lower_by(rule: Callable[..., Any], operator: Any) -> None:
    """Have Inductor compile an operator by one of the rules below, which are given Inductor's own values."""
    private("torch._inductor.lowering", "register_lowering")(operator, type_promotion_kind=None)(rule)


def lower_materialised(x: Any, after: Any, strides: Any = None) -> Any:
    """x becomes a buffer, fused with nothing and computed behind ``after``."""
    graph, ir = private("torch._inductor.virtualized", "V").graph, private("torch._inductor", "ir")
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


def pass_base() -> type:
    """What a pass over Inductor's kernels derives from, so that compiled graphs are cached; another in torch 2.11."""
    module = importlib.import_module("torch._inductor.custom_graph_pass")
    return getattr(module, "CustomSchedulerPass", None) or private(module.__name__, "CustomGraphPass")


def set_apart(kernels: list[Any]) -> list[Any]:
    """Inductor's kernels before it fuses them. Inductor compares pairs of kernels in the order of the buffers that they
    share; until :func:`join` those of :func:`lower_materialised` name no buffers, so the others keep their order."""
    names = getattr(private("torch._inductor.virtualized", "V").graph, "gistkit_apart", set())
    for kernel in kernels:
        if kernel.get_buffer_names() & names:
            kernel.used_buffer_names = type(names)
    return kernels


def join(kernels: list[Any]) -> list[Any]:
    """Inductor's kernels on a GPU, with each of :func:`lower_materialised` put into others that sum nothing: those that
    make what it alone reads or what is materialised, and those that read the same and do not depend on it. All other
    kernels stay as they are, and random draws keep their order."""
    graph = private("torch._inductor.virtualized", "V").graph
    names, found = getattr(graph, "gistkit_apart", set()), private("torch.utils._ordered_set", "OrderedSet")(kernels)
    if not names:
        return draw_in_turn(kernels)
    scheduler: Any = kernels[0].scheduler
    graph.no_fuse_buffer_names -= names
    scheduler.merge_loops()  # as Inductor does next: tensors that are looked at in several shapes have one
    for kernel in kernels:
        vars(kernel).pop("used_buffer_names", None)
        if hasattr(kernel, "snodes") and not kernel.is_reduction():
            private("torch._inductor.scheduler", "refresh_group_node_dependencies")(kernel)

    def may_join(own: Any, other: Any) -> bool:
        waits = own.get_operation_names() & other.ancestors
        if other is own or other.is_reduction() or waits or not own.used_buffer_names() & other.used_buffer_names():
            return False
        read = {dep.name for dep in own.read_writes.reads if dep.name in other.get_buffer_names()}
        if any(u.node not in own.get_nodes() for n in read.difference(names) for u in scheduler.name_to_buf[n].users):
            return False
        return scheduler.can_fuse(other, own) and not scheduler.will_fusion_create_cycle(other, own)

    for name in [*names]:
        own: Any = scheduler.name_to_fused_node.get(scheduler.name_to_buf[name].defining_op_name())
        while own and own.is_gpu() and (hosts := [kernel for kernel in found if may_join(own, kernel)]):
            host = max(hosts, key=lambda kernel: scheduler.score_fusion_memory(kernel, own))
            own = scheduler.fuse_two_nodes(host, own, found)
            if not own.get_buffer_names() <= names:
                break
    return draw_in_turn(scheduler.topological_sort_schedule(list(found)))


def join_late(kernels: list[Any]) -> list[Any]:
    """:func:`join`, with each kernel where the last of those that Inductor fused to it would run, not the first: as
    :mod:`gistkit.compiled.memory` predicts the peak. Inductor takes an order of its own where that needs less."""
    kernels, places = join(kernels), dict[Any, int]()
    for kernel in kernels:
        place = max([kernel.max_order, *(places.get(dep.name, 0) for dep in kernel.unmet_dependencies)])
        places |= dict.fromkeys((kernel, *kernel.get_buffer_names()), place)
    return sorted(kernels, key=places.__getitem__)


def operands(node: fx.Node) -> dict[str, Any]:
    """What an operator of a graph is called with, by its schema's names, defaults included."""
    named = getattr(getattr(node.target, "_schema", None), "arguments", ())
    given = dict(zip((a.name for a in named), node.args, strict=False)) | node.kwargs
    return {a.name: a.default_value for a in named if a.has_default_value()} | given


def other_draws(graph: fx.Graph) -> str:
    """A note, or an empty text. Where an operator of forward draws random numbers ahead of dropout's seeds, neither
    needs the other, and plain torch.compile may draw the seeds first."""
    seeded = [n for n in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]
    drawing = [n.target for n in seeded if operands(n).get("dropout_p") != 0]
    behind = torch.ops.prims.inductor_seeds.default in drawing[1:]
    return "dropout may drop other elements than under torch.compile: an operator draws before it" if behind else ""


def draw_in_turn(kernels: list[Any]) -> list[Any]:
    """Inductor's kernels; those that draw random numbers, as for dropout's seeds and in attentions, will keep their
    order: Inductor reorders for the peak, so gistkit's graphs would draw other numbers than plain torch.compile's."""
    weak, seeded = private("torch._inductor.dependencies", "WeakDep"), torch.Tag.nondeterministic_seeded
    drawing = [k for k in kernels if seeded in getattr(getattr(k.node, "op_overload", None), "tags", ())]
    for first, then in pairwise(drawing):
        then.add_fake_dep(weak(first.get_outputs()[0].get_name(), then.get_name(), is_fake=True))
    return kernels


def lower_written(x: Any) -> Any:
    """x becomes a buffer as any other, in the layout that Inductor gives to what forward saves."""
    graph, ir = private("torch._inductor.virtualized", "V").graph, private("torch._inductor", "ir")
    node = graph.current_node
    rounded = node.args[0].target is torch.ops.gistkit.rounded.default  # laid out as what torch.compile saves
    strides = (node.args[0].args[0] if rounded else node.args[0]).meta["val"].stride()
    if len(strides) == 4 and node.args[0] in graph.nodes_prefer_channels_last:
        strides = ir.FlexibleLayout.stride_ordered_for_memory_format(x.get_size(), torch.channels_last)
    if strides and all(isinstance(s, int) for s in strides):
        x = ir.ExternKernel.require_exact_strides(x, strides, allow_padding=True)
    x.realize()
    return x


def lower_moment(x: Any, count: float) -> Any:
    """The one buffer that the variance x is computed from. Raises CompileError where Inductor has it otherwise."""
    graph, ir = private("torch._inductor.virtualized", "V").graph, private("torch._inductor", "ir")
    quotient = x.data.data
    reads = {read.name for read in quotient.get_reads()} if isinstance(quotient, ir.Pointwise) else set()
    found = graph.get_buffer(reads.pop()) if len(reads) == 1 else None
    if found is None:
        raise CompileError(
            "compile: a variance must be a quotient of one buffer of Inductor's, as in torch "
            f'{RELEASES}; got {type(quotient).__name__} in torch {torch.__version__}; pass fidelity="reassociated"'
        )
    return ir.TensorBox.create(found)


def _pointwise(x: Any, made: Callable[[Any, Callable[[], Any], torch.dtype], Any]) -> Any:
    """``made(ops, what loads x, dtype)`` of each element."""
    ops, load, dtype = private("torch._inductor.virtualized", "ops"), x.make_loader(), x.get_dtype()
    pointwise = private("torch._inductor.ir", "Pointwise")
    words = {"device": x.get_device(), "dtype": dtype, "ranges": x.get_size()}
    return pointwise.create(inner_fn=lambda index: made(ops, lambda: load(index), dtype), **words)


def lower_variance(x: Any, count: float) -> Any:
    """Inductor's own variance: the moment x over a constant."""
    return _pointwise(x, lambda ops, load, dtype: load() / ops.constant(count, dtype))


def lower_rounded(x: Any) -> Any:
    """x is rounded to its own dtype where kernels compute in a wider one."""
    return _pointwise(x, lambda ops, load, to: ops.to_dtype(ops.to_dtype(load(), to, use_compute_types=False), to))


def lower_short(x: Any, once: bool = False) -> Any:
    """x; all that it is computed by counts as one operation and one read where Inductor chooses buffers, with ``once``
    also where several read x."""

    def made(ops: Any, load: Callable[[], Any], dtype: torch.dtype) -> Any:
        counts = getattr(private("torch._inductor.virtualized", "V").get_ops_handler(), "__dict__", {})  # getattr warns
        before = {name: counts[name] for name in ("op_count", "_nontrivial_read_count") if name in counts}
        read = counts.get("_read_names", [])
        first, loaded = len(read), load()
        counts.update({name: min(count + 1, counts[name]) for name, count in before.items()})
        del read[first + 1 if once else len(read) :]
        return loaded

    return _pointwise(x, made)


def pooled(
    gradient: Any, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, offsets: Any, same: bool
) -> Any:
    """PyTorch's own gradient of a max-pool, of tensors or of Inductor's values."""
    made: list[Any] = [torch.ops.prims._low_memory_max_pool_offsets_to_indices.default,
                       torch.ops.aten.max_pool2d_with_indices_backward.default]  # fmt: skip
    if not isinstance(x, torch.Tensor):
        made = [private("torch._inductor.lowering", "lowerings")[operator] for operator in made]
    size = x.shape[-2:] if isinstance(x, torch.Tensor) else x.get_size()[-2:]
    indices = made[0](offsets, kernel, size, stride, padding, dilation)
    return made[1](gradient, x, kernel, stride, padding, dilation, ceil, indices)


def lower_pooled(
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
        return pooled(gradient, x, kernel, stride, padding, dilation, ceil, offsets, same)
    ir, ops = private("torch._inductor", "ir"), private("torch._inductor.virtualized", "ops")
    division = private("torch.utils._sympy.functions", "FloorDiv")
    known_less = private("torch._inductor.virtualized", "V").graph.sizevars.statically_known_lt
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
        made = private("torch._inductor.lowering", "lowerings")[made]
    return made(x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups)
