"""What backward reads of a max-pool's input, where the cut saves it in full."""

import pytest
import torch
from torch import nn

from gistkit.compiled.edit import encode
from gistkit.compiled.forms import packing
from gistkit.compiled.pools import lay_out_stand_ins, only_signs_are_read, rewritten
from tests.support.compiled_cases import assert_same, case, plain_step, run_edited

aten = torch.ops.aten


def pools(pair):
    return pair.backward.graph.find_nodes(op="call_function", target=aten.max_pool2d_with_indices_backward.default)


@pytest.mark.parametrize("materialise", [False, True])
def test_a_pools_input_is_kept_as_bits_and_the_comparison_stays(materialise):
    model, x, y = case("vgg", rows=32)
    found = []

    def edit(pair):
        for choice in packing.choices(pair):
            if choice.form is not None and choice.node.meta["val"].is_floating_point():
                (payload,) = encode(pair, choice.node, choice.form, materialise)
                assert payload.meta["val"].numel() * 8 == choice.node.meta["val"].numel()
                found.append(choice.node)

    assert_same(plain_step("vgg", 32), run_edited(edit, model, x, y))
    assert len(found) == 2


def test_what_is_read_by_value_is_no_matter_of_signs():
    model, x, y = case("vgg", rows=32)

    def edit(pair):
        (first, *_) = [n.args[1] for n in pools(pair)]
        (saved,) = [n for n in pair.tensors if pair.place(n) is first]
        assert only_signs_are_read(pair, saved)
        with pair.backward.graph.inserting_before(pair.backward.graph.output_node()):
            pair.backward.graph.call_function(aten.neg.default, (first,))
        assert not only_signs_are_read(pair, saved)

    run_edited(edit, model, x, y)


def test_stand_ins_lie_as_the_input_does():
    model, x, y = case("vgg", rows=32)
    x = x.contiguous(memory_format=torch.channels_last)

    def edit(pair):
        assert rewritten(pair.backward) == 2
        lay_out_stand_ins(pair)
        assert [n.args[1].meta["val"].stride(1) for n in pools(pair)] == [1, 1]

    run_edited(edit, model, x, y)  # of another layout, so sums may differ in their last bits


def test_an_average_pools_gradient_lies_as_its_input_does():
    """Else the convolution before it copies the gradient, as in DenseNet's transitions."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.AvgPool2d(2), nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model, last = nn.Sequential(*layers), torch.channels_last
    x, y = torch.randn(4, 3, 18, 18).contiguous(memory_format=last), torch.randint(4, (4,))

    def edit(pair):
        assert rewritten(pair.backward) == 1
        lay_out_stand_ins(pair)
        (pool,) = pair.backward.graph.find_nodes(op="call_function", target=aten.avg_pool2d_backward.default)
        assert pool.args[1].meta["val"].is_contiguous(memory_format=last)

    run_edited(edit, model, x, y)
