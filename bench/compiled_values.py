"""Where the values of ``gistkit.compile`` with all rebuilds leave those of ``torch.compile``, on the device at hand.

    python -m bench.compiled_values --out FILE.jsonl --models convnext_tiny --confs bf16 [--batch 128]

A network's step is compiled three ways. Plain; ``rebuilt``: with all rebuilds of the bitwise class; ``beside``: the
same, but each original is saved too, so that forward has plain's kernels and backward compares each rebuilt value with
what was saved. In all three, what products, convolutions and attentions read and write is summed up by its bits.

A row for each of the two has:

* ``cones`` (``beside``): rebuilt values that differ from the saved ones in a bit or in strides: how many elements, the
  largest difference, strides of both, the operators that compute it, its readers. ``compared``: of how many values.
* ``first``: of the operands and results of products, convolutions and attentions the first that differ from plain's,
  in the graph's order, with strides and the alignment of their memory. ``operands_alike``: results that differ though
  values, strides and alignment of all operands are plain's. ``differing``: how many differ, ``laid_out``: only in
  strides or alignment, with the first of them.
* ``unequal``: the loss and gradients that differ from plain's, all of them.
"""

from __future__ import annotations

import gc
import json
import operator
import sys
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch._functorch.config
import torch._inductor.config
from torch import fx
from torch.fx.node import has_side_effect

from bench.compiled import Run, Variant, arguments, caches, unequal
from bench.rows import environment, utc
from gistkit.compiled import compat, edit, partitioner
from gistkit.compiled.operators import materialised
from gistkit.compiled.partitioner import Moves, Settings, cut
from gistkit.compiled.rebuilds.rounding import in_memory
from gistkit.compiled.split import is_tensor

FIRST = 40
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Seen(NamedTuple):
    """One tensor at run time: a sum over its bits, strides, the largest power of 2 up to 64 that its address is a
    multiple of."""

    bits: Any
    strides: tuple[int, ...]
    aligned: int


SEEN: dict[str, Seen] = {}
COMPARED: dict[str, list[Any]] = {}
CONES: dict[str, dict[str, Any]] = {}
ORDER: dict[str, str] = {}
"""Keys of what is seen, in the order of the graphs, and the operators' names."""
_LIBRARY = torch.library.Library("gistkit_bench", "FRAGMENT")
_LIBRARY.define("seen(Tensor x, str key) -> ()", tags=(torch.Tag.flexible_layout,))
_LIBRARY.define("compared(Tensor x, Tensor saved, str key) -> ()", tags=(torch.Tag.flexible_layout,))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().view(INTEGERS[x.element_size()])


def _see(x: torch.Tensor, key: str) -> None:
    number = _bits(x).long()
    address = x.data_ptr() & 63
    SEEN[key] = Seen((number * number * number + number).sum(), x.stride(), address & -address if address else 64)


def _compare(x: torch.Tensor, saved: torch.Tensor, key: str) -> None:
    other = _bits(x) != _bits(saved)
    COMPARED[key] = [other.sum(), (x.double() - saved.double()).abs().max(), x.stride(), saved.stride()]


for _name, _made in (("seen", _see), ("compared", _compare)):
    _LIBRARY.impl(_name, _made, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gistkit_bench::{_name}", lambda *_: None, lib=_LIBRARY)
    has_side_effect(getattr(torch.ops.gistkit_bench, _name).default)


def _call(graph: fx.Graph, before: fx.Node, target: Any, *args: Any) -> None:
    with graph.inserting_before(before):
        graph.call_function(target, args).meta["val"] = None


def watch(module: fx.GraphModule, side: str) -> None:
    """Have a graph sum up, at its end, what its products, convolutions and attentions read and write."""
    graph, output = module.graph, module.graph.output_node()
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is operator.getitem or not in_memory(node):
            continue
        results = [node] if is_tensor(node) else [u for u in node.users if u.target is operator.getitem]
        for kind, tensors in (("operand", node.all_input_nodes), ("result", results)):
            for i, x in enumerate(tensors):
                if is_tensor(x):
                    key = f"{side}.{node.name}.{kind}.{i if kind == 'operand' or x is node else x.args[1]}"
                    ORDER.setdefault(key, str(node.target))
                    _call(graph, output, torch.ops.gistkit_bench.seen.default, x, key)
    graph.lint()
    module.recompile()


class Watched(compat.partitioner_base()):
    """PyTorch's own cut, or gistkit's under ``settings``, with what is to be seen. ``beside``: originals are saved."""

    def __init__(self, settings: Settings | None, beside: bool = False) -> None:
        self.settings, self.beside = settings, beside

    def uuid(self) -> Any:
        """Nothing: such graphs are not to be taken from a cache."""
        return None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **words: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """(forward, backward)."""
        if self.settings is None:
            pair = compat.min_cut(gm, joint_inputs, **words)
        else:
            with ExitStack() as stack:
                stack.enter_context(patch.object(partitioner, "same_kernels", lambda settings, graph: settings.exact))
                if self.beside:
                    self._save_originals(stack)
                pair = cut(gm, joint_inputs, self.settings, **words)
        for module, side in zip(pair, ("forward", "backward"), strict=True):
            watch(module, side)
        return pair

    def _save_originals(self, stack: ExitStack) -> None:
        made: list[tuple[edit.Cone, list[fx.Node]]] = []
        rebuild, finish = edit.rebuild, Moves.finish

        def noted(pair: Any, cone: edit.Cone, *args: Any, **kwargs: Any) -> None:
            def found() -> list[fx.Node]:
                return list(pair.backward.graph.find_nodes(op="call_function", target=materialised()))

            before = set(found())
            rebuild(pair, cone, *args, **kwargs)
            made.append((cone, [node for node in found() if node not in before]))

        def saved(self: Moves) -> None:
            for cone, nodes in made:
                for node in nodes:
                    key, place = cone.root.name, self.pair.place(cone.root)
                    _call(node.graph, node.next, torch.ops.gistkit_bench.compared.default, node, place, key)
                    CONES[key] = {
                        "operators": [str(n.target).removeprefix("aten.") for n in cone.nodes],
                        "leaves": [leaf.name for leaf in cone.leaves],
                        "readers": [f"{u.name}" for u in node.users if "gistkit_bench" not in str(u.target)][:8],
                    }
            finish(self)

        stack.enter_context(patch.object(edit, "rebuild", noted))
        stack.enter_context(patch.object(Moves, "finish", saved))


def step(name: str, conf: str, made: Watched, options: Any) -> tuple[dict, dict[str, Seen]]:
    """Loss and gradients of a step, and what was seen of it."""

    def prepare(model: Any, **_: Any) -> Any:
        return torch.compile(model, options={"custom_partitioner_fn": made})

    SEEN.clear()
    torch._dynamo.reset()
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    with caches(None), uncached, torch._inductor.config.patch(fx_graph_cache=False):
        bits = Run(name, conf, Variant(prepare), options).bits()
    seen = {key: Seen(int(s.bits), tuple(s.strides), s.aligned) for key, s in SEEN.items()}
    SEEN.clear()
    return bits, seen


def differences(plain: dict[str, Seen], ours: dict[str, Seen]) -> dict[str, Any]:
    """What was seen otherwise, in the graphs' order."""
    keys = [key for key in ORDER if key in plain and key in ours]
    values = [key for key in keys if plain[key].bits != ours[key].bits]
    other = {key for key in keys if plain[key] != ours[key]}
    owner = {key: key.rsplit(".", 2)[0] for key in keys}
    moved = {owner[key] for key in other if ".operand." in key}
    told = lambda key: [key, ORDER[key], plain[key].strides, ours[key].strides, plain[key].aligned, ours[key].aligned]  # noqa: E731
    alike = [key for key in values if ".result." in key and owner[key] not in moved]
    laid_out = [key for key in keys if key in other and key not in set(values)]
    return {
        "of": len(keys), "only_one_has": sorted(plain.keys() ^ ours.keys())[:FIRST], "differing": len(values),
        "first": [told(key) for key in values[:FIRST]], "operands_alike": [told(key) for key in alike[:FIRST]],
        "laid_out": len(laid_out), "first_laid_out": [told(key) for key in laid_out[:FIRST]],
    }  # fmt: skip


def cones() -> dict[str, Any]:
    """The rebuilt values that differ from the saved ones."""
    rows = []
    for key, (count, most, strides, saved) in COMPARED.items():
        if int(count) or strides != saved:
            row = {"root": key, "unequal": int(count), "largest": float(most), "strides": strides, "saved": saved}
            rows.append(row | CONES[key])
    return {"compared": len(COMPARED), "cones": rows}


def main(argv: list[str] | None = None) -> int:
    """The command line; exit status 1 where a network failed."""
    options, failed = arguments(argv), False
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name, conf in [(name, conf) for conf in options.confs.split(",") for name in options.models.split(",")]:
        for known in (SEEN, COMPARED, CONES, ORDER):
            known.clear()
        base: Any = None
        for label, made in (
            ("plain", Watched(None)),
            ("beside", Watched(Settings(), beside=True)),
            ("rebuilt", Watched(Settings())),
        ):
            row = {"model": name, "conf": conf, "variant": label, "kind": "values", "time_utc": utc()}
            row |= environment(options.device)
            try:
                bits, seen = step(name, conf, made, options)
                base = base or (bits, seen)
                row |= {"unequal": unequal(bits, base[0]), **differences(base[1], seen)}
                row |= cones() if label == "beside" else {}
            except Exception as error:
                row, failed = {**row, "error": f"{type(error).__name__}: {error}"[:2000]}, True
            with open(options.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(line_of(row), flush=True)
            gc.collect()
    return int(failed)


def line_of(row: dict[str, Any]) -> str:
    """A row in words."""
    head = f"{row['model']} {row['conf']} {row['variant']}: "
    if "error" in row:
        return head + row["error"][:300]
    text = f"{len(row['unequal'])} gradients, {row['differing']} of {row['of']} operands and results differ"
    wrong = [cone["root"] for cone in row.get("cones", ())]
    return head + text + (f"; {len(wrong)} of {row['compared']} rebuilt values: {wrong[:8]}" if wrong else "")


if __name__ == "__main__":
    sys.exit(main())
