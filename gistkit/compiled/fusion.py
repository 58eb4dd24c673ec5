"""Passes over Inductor's kernels: before Inductor fuses them (:func:`set_apart`), and behind that."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import fx

from gistkit.compiled import compat


def set_apart(kernels: list[Any]) -> list[Any]:
    """Inductor's kernels before it fuses them. Inductor compares pairs of kernels in the order of the buffers that they
    share; until :func:`join` those that are materialised name no buffers, so the others keep their order."""
    names = getattr(compat.part("V").graph, "gistkit_apart", set())
    for kernel in kernels:
        if kernel.get_buffer_names() & names:
            kernel.used_buffer_names = type(names)
    return kernels


def join(kernels: list[Any]) -> list[Any]:
    """Inductor's kernels on a GPU, with each that is materialised (:mod:`gistkit.compiled.operators`) put into others
    that sum nothing: those that make what it alone reads or what is materialised, and those that read the same and do
    not depend on it. All other kernels stay as they are, and random draws keep their order."""
    graph = compat.part("V").graph
    names, found = getattr(graph, "gistkit_apart", set()), compat.part("OrderedSet")(kernels)
    if not names:
        return draw_in_turn(kernels)
    scheduler: Any = kernels[0].scheduler
    graph.no_fuse_buffer_names -= names
    scheduler.merge_loops()  # as Inductor does next: tensors that are looked at in several shapes have one
    for kernel in kernels:
        vars(kernel).pop("used_buffer_names", None)
        if hasattr(kernel, "snodes") and not kernel.is_reduction():
            compat.part("refresh_group_node_dependencies")(kernel)

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


def draw_in_turn(kernels: list[Any]) -> list[Any]:
    """Inductor's kernels; those that draw random numbers, as for dropout's seeds and in attentions, will keep their
    order: Inductor reorders for the peak, so gistkit's graphs would draw other numbers than plain torch.compile's."""
    weak, seeded = compat.part("WeakDep"), torch.Tag.nondeterministic_seeded
    drawing = [k for k in kernels if seeded in getattr(getattr(k.node, "op_overload", None), "tags", ())]
    for first, then in pairwise(drawing):
        then.add_fake_dep(weak(first.get_outputs()[0].get_name(), then.get_name(), is_fake=True))
    return kernels


def other_draws(graph: fx.Graph) -> str:
    """A note, or an empty text. Where an operator of forward draws random numbers ahead of dropout's seeds, neither
    needs the other, and plain torch.compile may draw the seeds first."""
    seeded = [n for n in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]
    drawing = [n.target for n in seeded if compat.operands(n).get("dropout_p") != 0]
    behind = torch.ops.prims.inductor_seeds.default in drawing[1:]
    return "dropout may drop other elements than under torch.compile: an operator draws before it" if behind else ""
