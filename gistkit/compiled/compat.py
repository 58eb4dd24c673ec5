"""The private names of PyTorch that the compiled path uses, in one place.

They hold for torch 2.11 to 2.13. :func:`private` finds one, or raises CompileError, which names the release at hand."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import fx

from gistkit.errors import CompileError

RELEASES = "2.11 to 2.13"
Graphs = tuple[fx.GraphModule, fx.GraphModule]
NOT_CHECKED = "saved_tensor_with_no_vc_check"
"""In the ``meta`` of a saved tensor that autograd does not check the version of."""
_LAYOUT = "gistkit_channels_last"  # in the meta of a forward graph's output


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
    split = getattr(part("TracingContext").try_get(), "ddp_optimizer_ctx", None)
    return -1 if found is None else int(found), -1 if split is None else int(split.curr_bucket) + 1


def real_parameters(inputs: Iterable[Any]) -> list[torch.nn.Parameter]:
    """The parameters among a graph's inputs. The parts of a graph that was split for DistributedDataParallel have fake
    ones, in place of which those of the whole graph are found that they stand for."""
    given = [p for p in inputs if isinstance(p, torch.nn.Parameter)]
    context, mode = part("TracingContext").try_get(), getattr(given[0], "fake_mode", None) if given else None
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
    """Whether Inductor will lay out the images of a forward graph as channels_last. The first call decides, before
    gistkit adds nodes to the graph: Inductor's rule counts them."""
    known = graph.graph.output_node().meta
    if _LAYOUT not in known:
        known[_LAYOUT] = bool(_layouts()(graph, is_inference=False))
    return known[_LAYOUT]


@cache
def _layouts() -> Callable[..., Any]:
    """Inductor's rule. From the first call on Inductor itself takes what :func:`prefers_channels_last` has decided."""
    lowering = private("torch._inductor.graph", "GraphLowering")
    own = lowering.decide_layout_opt

    def decide(graph: fx.GraphModule, *, is_inference: bool) -> Any:
        known = graph.graph.output_node().meta.get(_LAYOUT)
        return own(graph, is_inference=is_inference) if known is None else known

    lowering.decide_layout_opt = staticmethod(decide)
    return own


@cache
def choose_blocks(rule: Callable[[Any], dict[str, int] | None]) -> None:
    """From now on Inductor's kernels on a GPU have the block sizes that ``rule`` gives for their features, if any."""
    own, fixed = part("InductorChoices").triton_kernel_kwargs, part("FixedTritonConfig")

    def words(self: Any, kernel: type, features: Any, groups: Any, given: dict[str, Any]) -> dict[str, Any]:
        if (blocks := rule(features)) is not None:
            given = {**given, "fixed_config": fixed(blocks), "override_persistent_reduction": True}
        return own(self, kernel, features, groups, given)

    part("InductorChoices").triton_kernel_kwargs = words


_PARTS = {
    "ir": "torch._inductor", "V": "torch._inductor.virtualized", "ops": "torch._inductor.virtualized",
    "lowerings": "torch._inductor.lowering", "register_lowering": "torch._inductor.lowering",
    "InductorChoices": "torch._inductor.choices", "FixedTritonConfig": "torch._inductor.codegen.triton",
    "_TorchCompileInductorWrapper": "torch", "FloorDiv": "torch.utils._sympy.functions",
    "OrderedSet": "torch.utils._ordered_set", "WeakDep": "torch._inductor.dependencies",
    "refresh_group_node_dependencies": "torch._inductor.scheduler",
    "_disable_current_modes": "torch.utils._python_dispatch", "TracingContext": "torch._guards",
    "free_symbols": "torch.fx.experimental.symbolic_shapes",
    "find_symbol_binding_fx_nodes": "torch.fx.experimental.symbolic_shapes",
}  # fmt: skip
"""The modules of private parts of PyTorch that are used as they are."""


def part(name: str) -> Any:
    """A private part of PyTorch: ``V.graph`` is what Inductor compiles, ``ops`` makes elements, ``ir`` buffers,
    ``TracingContext.try_get()`` is of the graph that is being traced or compiled, None outside of both."""
    return private(_PARTS[name], name)


def pass_base() -> type:
    """What a pass over Inductor's kernels derives from, so that compiled graphs are cached; another in torch 2.11."""
    module = importlib.import_module("torch._inductor.custom_graph_pass")
    return getattr(module, "CustomSchedulerPass", None) or private(module.__name__, "CustomGraphPass")


def operands(node: fx.Node) -> dict[str, Any]:
    """What an operator of a graph is called with, by its schema's names, defaults included."""
    named = getattr(getattr(node.target, "_schema", None), "arguments", ())
    given = dict(zip((a.name for a in named), node.args, strict=False)) | node.kwargs
    return {a.name: a.default_value for a in named if a.has_default_value()} | given
