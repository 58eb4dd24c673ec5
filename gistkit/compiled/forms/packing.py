"""Which saved tensors can be encoded, and how: bools, max-pools' maps, floats where rounding is allowed (Gist section
IV-A). What stays exact: docs/compiled.md, "From the joint graph to two smaller ones"."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from gistkit.compiled import compat
from gistkit.compiled.forms import bits
from gistkit.compiled.forms.narrow import Cast, Narrow, narrow
from gistkit.compiled.pools import only_signs_are_read
from gistkit.compiled.readers import readers, reads_memory
from gistkit.compiled.split import Pair, elements, is_tensor, is_view, storage_bytes, storage_of, storages, value
from gistkit.formats import SCALE_BLOCK
from gistkit.ir import Kept

aten, prims = torch.ops.aten, torch.ops.prims
LEAST_ROUNDED = 4096
_ON_THE_WAY = (aten.mul.Tensor, aten.div.Tensor, prims.convert_element_type.default, aten.alias.default)
_STEPS = 12
"""Operators behind a saved tensor among which its exponential is looked for; a loss under autocast has eight."""
LEAST_ELEMENTS = 1024
"""What is smaller stays as it is: a kernel's launch costs more than its bytes."""
LEAST_SHARE = 1e-3
"""Of all kept bytes. What is smaller is not rounded: a layer norm's means, if decoded, cost a pass of their own."""
SHORT_ROW = 512
"""Up to so many elements torch 2.11 gives a program of a norm's backward four rows, too many for it to decode them."""
VALUES = "values that backward reads, each in full"


@dataclass(frozen=True)
class Choice:
    """What becomes of one saved tensor: its encoding or None, and why. ``kernels``: how many a rounding takes."""

    node: fx.Node
    form: bits.Bits | Narrow | Cast | None
    reason: str
    kernels: int = 0


class Rounding(NamedTuple):
    """How floats are rounded: the format's name, the nodes of forward that follow from parameters alone, the bytes
    that a tensor has at least, and whether bytes come before time, as under a budget."""

    name: str
    static: Collection[fx.Node]
    least_bytes: int = 0
    bytes_first: bool = False


def own_tensors(pair: Pair) -> list[fx.Node]:
    """Saved tensors whose storage is neither an input's nor a result's: what backward alone keeps alive."""
    foreign = storages((*pair.inputs, *pair.outputs))
    return [node for node in pair.tensors if storage_of(node) not in foreign]


def choices(pair: Pair, rounding: Rounding | None = None) -> list[Choice]:
    """A choice for each tensor of :func:`own_tensors`, those of one storage next to each other."""
    last, on_storage = compat.prefers_channels_last(pair.forward), defaultdict[int, list[Choice]](list)
    for node in own_tensors(pair):
        on_storage[storage_of(node)].append(_choice(pair, node, rounding, last))
    return [_together(choice, group) for group in on_storage.values() for choice in group]


def _together(choice: Choice, all_on_storage: list[Choice]) -> Choice:
    """The choice for one of several tensors on a storage, as queries, keys and values: all are rounded or none, as what
    is left would keep the storage."""
    if len(all_on_storage) == 1:
        return choice
    size = sum(elements(other.node) * value(other.node).element_size() for other in all_on_storage)
    if size <= storage_bytes(choice.node) and all(isinstance(other.form, Narrow | Cast) for other in all_on_storage):
        return replace(choice, kernels=max(other.kernels for other in all_on_storage))
    return Choice(choice.node, None, "several saved tensors are on this storage")


def _choice(pair: Pair, node: fx.Node, rounding: Rounding | None, last: bool) -> Choice:
    x = value(node)
    if x.is_floating_point() and elements(node) >= LEAST_ELEMENTS and only_signs_are_read(pair, node):
        form = bits.packed(x, last)
        if form is not None:
            return Choice(node, form, "backward reads where it is positive")
    if x.dtype not in (torch.bool, torch.int8):
        return Choice(node, None, VALUES) if rounding is None else _rounded(pair, node, rounding, last)
    if elements(node) < LEAST_ELEMENTS:
        return Choice(node, None, f"fewer than {LEAST_ELEMENTS} elements")
    if x.dtype is torch.bool:
        form = bits.packed(x, last)
        return Choice(node, form, "a bool is one bit" if form else "no dimension is a known multiple of 8")
    if (positions := bits.window_positions(node)) is None:
        return Choice(node, None, VALUES)
    if positions > 16:
        return Choice(node, None, f"a max-pool's window of {positions} positions needs more than 4 bits")
    form = bits.packed(x, last)
    return Choice(node, form, f"a max-pool's window of {positions} positions" if form else "no dimension is even")


def _rounded(pair: Pair, node: fx.Node, rounding: Rounding, last: bool) -> Choice:
    form = stays_exact(pair, node, rounding) or narrow(rounding.name, value(node), last)
    if isinstance(form, str):
        return Choice(node, None, form)
    why, kernels = f'lossy="{rounding.name}"', own_kernels(pair, node, form)
    if rounding.bytes_first or not _decodes_slowly(pair, node, form):
        return Choice(node, form, why, kernels)
    if form.dtype == torch.float32 and form.fmt.bits < 16:  # bf16 has more bits of mantissa than fp10
        return Choice(node, Cast(), f"{why}, but short rows that a norm reads are bf16")
    return Choice(node, form, why, kernels + 2)


def described(node: fx.Node, form: str, kept_bytes: int, reason: str) -> Kept:
    """The row of one storage."""
    x = value(node)
    shape = tuple(d if isinstance(d, int) else -1 for d in x.shape)
    op = str(node.target).removeprefix("aten.").removesuffix(".default") if node.op == "call_function" else node.op
    if "getitem" in op and isinstance(node.args[0], fx.Node):
        op = f"{str(node.args[0].target).removesuffix('.default').rpartition('.')[2]}[{node.args[1]}]"
    dtype = str(x.dtype).removeprefix("torch.")
    return Kept(node.name, op, shape, dtype, form, storage_bytes(node), kept_bytes, reason)


def of_parameters(pair: Pair, static_inputs: Collection[int]) -> set[fx.Node]:
    """Nodes of forward that follow from its static inputs, parameters and buffers, alone."""
    found = {node for i, node in enumerate(pair.inputs) if i in static_inputs}
    for node in pair.forward.graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def stays_exact(pair: Pair, node: fx.Node, rounding: Rounding) -> str | None:
    """Why a saved tensor is not rounded, None where it may be."""
    if value(node).dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "no float"
    if elements(node) < LEAST_ROUNDED or node in rounding.static:
        small = elements(node) < LEAST_ROUNDED
        return f"fewer than {LEAST_ROUNDED} elements" if small else "follows from parameters alone"
    if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:  # rounded, all of the segment would be off
        return "backward runs a segment again from it"
    if node in pair.whole_of.values():  # decoded in each norm's backward, the gradients' sum would be stored in fp32
        return "others are read as parts of it"
    if node.target is operator.getitem and node.args[1] != 0 and "attention" in str(node.args[0].target):  # type: ignore
        return "a statistic of an attention"
    if _exponentiated(pair.place(node)) or _is_given(pair.place(node), "attention", "attn_mask", "attn_bias"):
        return "backward exponentiates it"
    few = f"less than {LEAST_SHARE:.1%} of what is kept" if storage_bytes(node) < rounding.least_bytes else None
    return "the places of a grid_sample" if _is_given(pair.place(node), "grid_sampler", "grid") else few


def _is_given(node: fx.Node, op: str, *names: str) -> bool:
    """Whether an operator takes a node, or a view of it, by one of the names: an attention's mask, whose infinities no
    scale holds; where a grid_sample reads, as neighbours of a rounded place are others."""
    given = [compat.operands(user) for user in node.users if op in str(user.target)]
    further = (_is_given(user, op, *names) for user in node.users if is_view(user))
    return any(node in map(g.get, names) for g in given) or any(further)


def own_kernels(pair: Pair, node: fx.Node, form: Narrow) -> int:
    """How many kernels of its own a rounding takes: one to decode what a library reads; one to encode, unless Inductor
    puts that into a kernel that reads the tensor, whose rows fit into blocks of a scale and are not summed in it."""
    row = form.shape[-1]
    fits = not form.scaled or SCALE_BLOCK % row == 0 or row % SCALE_BLOCK == 0
    read = _computing(user for user in node.users if user.op != "output")
    sums = any(elements(n) * row == elements(node) for r in read for n in (r, *r.users) if is_tensor(n))
    return (not read or not fits or sums) + any(map(reads_memory, pair.place(node).users))


def _decodes_slowly(pair: Pair, node: fx.Node, form: Narrow) -> bool:
    """Whether a norm's backward over short rows would decode scaled codes: it would take twice its time."""
    row, read = form.shape[-1], _computing(pair.place(node).users)
    near = (n for r in read for n in (*r.all_input_nodes, *r.users) if is_tensor(n))
    return form.scaled and row <= SHORT_ROW and any(elements(n) * row == elements(node) for n in near)


def _computing(users: Iterable[fx.Node]) -> list[fx.Node]:
    """What Inductor may fuse with a tensor that ``users`` read, behind views and casts."""
    read = [r for user in users for r in readers(user) if not reads_memory(r)]
    return [r for u in read for r in (u.users if u.target is prims.convert_element_type.default else [u])]


def _exponentiated(node: fx.Node) -> bool:
    """Whether the difference of a node and something is exponentiated, as by a softmax or its logarithm."""
    reached = {(node, False)}
    for _ in range(_STEPS):
        further = set()
        for n, difference in reached:
            for user in n.users:
                if difference and user.target is aten.exp.default:
                    return True
                taken = user.target is aten.sub.Tensor
                if taken or user.target in _ON_THE_WAY or is_view(user):
                    further.add((user, difference or taken))
        reached = further
    return False
