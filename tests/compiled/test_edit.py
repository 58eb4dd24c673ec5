"""Edits of forward and backward graphs, run without Inductor."""

import operator

import pytest
import torch

from gistkit.compiled import Cone, Pair, rebuild
from gistkit.compiled.late import rebuild_late
from gistkit.compiled.split import is_tensor
from tests.support.compiled_cases import assert_same, case, run_edited

aten = torch.ops.aten


def pointwise_cone(pair: Pair, root, limit=12):
    """A root's pointwise producers down to inputs, saved tensors and what no pointwise operator makes."""
    nodes, leaves = [], []

    def visit(node):
        if node in nodes or node in leaves:
            return
        pointwise = node.op == "call_function" and torch.Tag.pointwise in getattr(node.target, "tags", ())
        views = node.target in (aten.unsqueeze.default, aten.full.default, torch.ops.prims.convert_element_type.default)
        if node is not root and (pair.is_saved(node) or not (pointwise or views)):
            leaves.append(node)
            return
        for operand in node.all_input_nodes:
            visit(operand)
        nodes.append(node)

    visit(root)
    return Cone(root, tuple(nodes), tuple(leaves)) if 0 < len(nodes) <= limit and nodes != [root] else None


def rebuild_some(made):
    def edit(pair):
        done = 0
        for root in list(pair.tensors):
            if root.op != "call_function" or root.target is operator.getitem or not is_tensor(root):
                continue
            if torch.Tag.pointwise not in getattr(root.target, "tags", ()) or root in pair.outputs:
                continue
            cone = pointwise_cone(pair, root)
            if cone is not None and not any(pair.is_overwritten(leaf) for leaf in cone.leaves):
                made(pair, cone)
                done += 1
        assert done

    return edit


@pytest.mark.parametrize(("name", "made"), [("conv", rebuild), ("conv", rebuild_late), ("block", rebuild_late)])
def test_rebuilt_cones_give_the_same_bits(name, made):
    model, x, y = case(name)
    plain = run_edited(None, model, x, y)
    assert_same(plain, run_edited(rebuild_some(made), model, x, y))


def test_rebuilt_cones_with_symbolic_sizes():
    model, x, y = case("one conv")
    plain = run_edited(None, model, x, y)
    assert_same(plain, run_edited(rebuild_some(rebuild), model, x, y, dynamic=True))
