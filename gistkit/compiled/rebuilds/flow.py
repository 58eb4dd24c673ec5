"""The flow of a cut pair of graphs (:mod:`gistkit.planning.flow`): what forward computes, and the modelled time of its
step."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import map_arg

from gistkit.compiled import compat, pools
from gistkit.compiled.edit import grows
from gistkit.compiled.readers import reads_memory
from gistkit.compiled.rebuilds.arithmetic import Arithmetic, copies
from gistkit.compiled.rebuilds.rounding import Roundings, behind_views, in_memory
from gistkit.compiled.split import Pair, by_row, is_number, is_tensor, is_view, origin, storage_bytes, storage_of, value
from gistkit.planning.flow import BYTES_A_S, CHEAP, FREE, MADE, UNKEPT, Flow, Limits, Value

aten = torch.ops.aten
_SPLITS = (aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default)  # no views to the partitioner's table
OPERATIONS_A_S, DEPTHWISE_A_S = {2: 5.8e14, 4: 1.0e14}, 7e12
"""Taken for an H100: 59 % of its bf16 products' rate, by the bytes of an element; a depthwise convolution's operations
a second, where ConvNeXt-T's reached 9e12, EfficientNet-B0's 5e12."""
_REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.var_mean.correction)


def describe(pair: Pair, static_inputs: Collection[int] | None, limits: Limits) -> Flow:
    """The flow of a cut pair. ``static_inputs``: indices of forward's inputs that outlive the step: parameters."""
    lasting = {node.name for i, node in enumerate(pair.inputs) if i in (static_inputs or ())}
    foreign = {storage_of(node) for node in (*pair.inputs, *pair.outputs) if is_tensor(node)}
    arithmetic = Arithmetic(pair, limits.bitwise)
    roundings = arithmetic.roundings
    relaid = compat.prefers_channels_last(pair.forward)
    needed = {node.name for node in pair.tensors if pair.place(node).users}
    readings = Counter(storage_of(node) for node in pair.tensors)
    values: dict[str, Value] = {}
    owners: dict[int, Value] = {}  # of storages: what a view is of may be kept in its place
    for node in pair.forward.graph.nodes:
        if node.op == "output":
            continue
        inputs = tuple(_twin(n, node, arithmetic, values) for n in node.all_input_nodes)
        if not is_tensor(node):
            kind = FREE if is_number(node) else CHEAP if _looks(node) else MADE
            values[node.name] = Value(node.name, inputs, kind, -1, UNKEPT, 0)
            continue
        storage, source = storage_of(node), origin(node)
        view = _looks(source) and values[source.all_input_nodes[0].name].storage == storage
        is_needed = node.name in needed
        stays = is_needed and not (roundings.may_be_dropped(node) and (not view or owners[storage].settled))
        read = (n for n in node.all_input_nodes if n.name in needed)
        loads = frozenset(n.name for n in read if _is_loaded(n, node, roundings))
        kind = _kind(node, pair, node.name in lasting, node in pair.whole_of or (storage in foreign and is_needed))
        again = kind == MADE and limits.products and grows(node) and _may_run_again(node) and readings[storage] <= 1
        weight = UNKEPT if view and not stays else packed_bytes(node, limits.bits)
        values[node.name] = Value(
            node.name, inputs, CHEAP if again else kind, storage, weight, _bytes(node),
            is_needed, view, follows=arithmetic.follows(node) and not stays and not (relaid and _is_relaid(node)),
            settled=roundings.may_be_kept(node) or arithmetic.count_of(node) is not None, loads=loads,
            product_s=library_s(node) if again else 0.0,
            by_row=by_row(node, relaid),
            for_libraries=is_needed and all(map(reads_memory, pair.place(node).users)),
        )  # fmt: skip
        owners.setdefault(storage, values[node.name])
    flow = Flow(values)
    spare_s = pools.spared_s(pair, limits.bitwise, relaid)
    return replace(flow, step_s=step_s(pair, flow.plain_bytes()), spare_s=spare_s)


TWIN = "*"
"""At the end of a name: a value as its readers compute it anew, though it is kept."""


def _twin(node: fx.Node, reader: fx.Node, arithmetic: Arithmetic, values: dict[str, Value]) -> str:
    """The name of what ``reader`` reads for an operand: the operand, or its twin, which is described here."""
    if not is_tensor(node) or not arithmetic.inlined(node, reader) or is_view(reader):
        return node.name
    name = node.name + TWIN
    if name not in values:
        inputs = tuple(_twin(n, reader, arithmetic, values) for n in node.all_input_nodes if is_tensor(n))
        follows = arithmetic.follows(node, inlined=True)
        values[name] = Value(name, inputs, CHEAP, -1, UNKEPT, _bytes(node), follows=follows)
    return name


def _is_loaded(node: fx.Node, reader: fx.Node, roundings: Roundings) -> bool:
    """Whether forward's kernel loads an operand that backward reads too; a library's operator does, and its readers."""
    if is_view(node):
        return in_memory(reader) or in_memory(behind_views(node))
    return in_memory(node) or roundings.from_memory(node, reader)


def _is_relaid(node: fx.Node) -> bool:
    """Whether Inductor may lay out a saved tensor for convolutions in a way that backward, which computes it from
    inputs alone, would not know of: a cast of a weight or an image that is not channels_last itself, by its strides."""
    if node.op != "call_function" or not all(n.op == "placeholder" for n in node.all_input_nodes):
        return False
    return value(node).dim() == 4 and value(node).stride(1) != 1


def _kind(node: fx.Node, pair: Pair, lasting: bool, held: bool) -> str:
    if node.op == "placeholder":
        return FREE if (lasting or pair.is_saved(node)) and node not in pair.overwritten else MADE
    return FREE if held else CHEAP if is_cheap(node) and node not in pair.whole_of.values() else MADE


def _looks(node: fx.Node) -> bool:
    return node.op == "call_function" and (node.target in _SPLITS or is_view(node))


def is_cheap(node: fx.Node) -> bool:
    """Whether backward may compute a node anew at the price of reading its operands. A random number generator is
    cheap where its operand is the seed, so that it draws the same numbers again."""
    source = origin(node)
    if source is not node:
        return _looks(source)
    if node.op != "call_function" or node.is_impure() or not _may_run_again(node):
        return False
    tags = getattr(node.target, "tags", ())
    computed = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return computed or node.target in copies() or _looks(node)


def _may_run_again(node: fx.Node) -> bool:
    return not str(node.meta.get("recompute", "")).endswith("MUST_SAVE")


def packed_bytes(node: fx.Node, bits: int = 64) -> int:
    """Bytes of a storage when it is kept: a bool in 1 bit, a max-pool's map in 4, a float in at most ``bits``."""
    dtype, full = value(node).dtype, storage_bytes(node)
    if dtype is torch.bool:
        return -(-full // 8)
    if dtype is torch.int8 and "max_pool" in str(origin(node).target):
        return -(-full // 2)
    return full * min(bits, 8 * dtype.itemsize) // (8 * dtype.itemsize) if dtype.is_floating_point else full


def _bytes(node: fx.Node) -> int:
    x = value(node)
    return min(compat.hint(x.numel()) * x.element_size(), storage_bytes(node))


def step_s(pair: Pair, kept_bytes: int) -> float:
    """Seconds that forward and backward take on a GPU, modelled: products and the like by themselves, fused kernels 4.5
    times the kept bytes, and what is summed over more than rows, as batch norms do in kernels of their own. Eight
    networks come within 12 % of an H100's time, EfficientNet-B0 and MobileNetV3 21 to 24 % below (docs/log.md)."""
    nodes = [n for module in (pair.forward, pair.backward) for n in module.graph.nodes if n.op == "call_function"]
    made = sum(library_s(n) for n in nodes if n.target is not operator.getitem and in_memory(n))
    return made + (4.5 * kept_bytes + sum(map(_summed_bytes, nodes))) / BYTES_A_S


def _summed_bytes(node: fx.Node) -> int:
    """Bytes of what a reduction reads, which the graph has in fp32 where it is kept in bf16; 0 where each row is
    reduced for itself, within the kernel that goes on with it."""
    if node.target not in _REDUCTIONS:
        return 0
    x, dims = value(node.all_input_nodes[0]), compat.operands(node).get("dim")
    by_rows = x.dim() > 1 and dims and all(dim in (-1, x.dim() - 1) for dim in dims)
    return 0 if by_rows else compat.hint(x.numel()) * x.element_size()


def library_s(node: fx.Node) -> float:
    """Of an operator of a library: the longer of its bytes at the bandwidth and its operations at their rate."""
    from torch.utils.flop_counter import flop_registry  # here, as it imports Triton

    made = [n for n in (node, *node.users) if is_tensor(n) and (n is node or n.target is operator.getitem)]
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))  # type: ignore[arg-type]
    args, kwargs = cast(Any, map_arg((node.args, node.kwargs), value))
    count = compat.hint(formula(*args, **kwargs, out_val=value(node))) if formula and made else 0
    rate = OPERATIONS_A_S.get(value(made[0]).element_size() if made else 4, OPERATIONS_A_S[4])
    backward = node.target is aten.convolution_backward.default
    if backward:  # the formula counts a weight's gradient without its groups
        count = 2 * compat.hint(args[bool(args[7])].numel() * args[2][0].numel()) * sum(args[10][:2])
    if backward or node.target is aten.convolution.default:
        x, weight = args[backward : backward + 2]
        rate = DEPTHWISE_A_S if x.shape[1] > weight.shape[1] == 1 else rate
    moved = {storage_of(n): storage_bytes(n) for n in (*node.all_input_nodes, *made) if is_tensor(n)}
    return max(sum(moved.values()) / BYTES_A_S, count / rate)
