"""What backward reads of a max-pool's input, where the cut saves it in full."""

import itertools
from functools import partial

import pytest
import torch
import torch._inductor.inductor_prims  # defines the pool
import torch.nn.functional as F
from torch import nn

from gistkit.compiled.edit import encode
from gistkit.compiled.forms import packing
from gistkit.compiled.operators import pooling
from gistkit.compiled.pools import lay_out_stand_ins, only_signs_are_read, rewritten, spared_s, take_offsets
from gistkit.planning.flow import BYTES_A_S
from tests.support.compiled_cases import assert_same, case, plain_step, run_edited

aten = torch.ops.aten


def pools(pair):
    return pair.backward.graph.find_nodes(op="call_function", target=aten.max_pool2d_with_indices_backward.default)


POOLS = [  # kernel, stride, padding, whether sizes are rounded up, image
    ((3, 3), (2, 2), (1, 1), False, (17, 16)), ((2, 2), (2, 2), (0, 0), False, (16, 15)),
    ((2, 2), (2, 2), (0, 0), True, (15, 15)), ((2, 2), (3, 3), (0, 0), False, (11, 10)),
    ((4, 2), (2, 1), (2, 1), False, (12, 14)), ((7, 7), (7, 7), (0, 0), False, (7, 7)),
]  # fmt: skip


def test_a_gradient_from_offsets_has_the_bits_of_inductors_own():
    torch.manual_seed(0)
    cases, last = [], {"memory_format": torch.channels_last}
    for (*words, image), dtype in itertools.product(POOLS, (torch.float32, torch.bfloat16)):
        x = torch.randint(-3, 3, (2, 8, *image)).to(dtype)  # with equal elements in a window
        result, offsets = torch.ops.prims._low_memory_max_pool_with_offsets(x, *words[:3], (1, 1), words[3])
        gradient = torch.where(torch.rand(result.shape) < 0.3, -0.0, torch.randn(result.shape)).to(dtype)
        tensors = gradient, x, offsets
        cases += [(words, tensors), (words, tuple(t.contiguous(**last) for t in tensors))]

    def steps(made, lanes=1):  # Inductor's own takes 53 s to compile for vectors, 13 for single elements
        run = lambda given: [made(*ts, *words) for (words, _), ts in zip(cases, given, strict=True)]  # noqa: E731
        with torch._inductor.config.patch({"cpp.simdlen": lanes}):
            return torch.compile(run, fullgraph=True)([ts for _, ts in cases])

    def own(gradient, x, offsets, kernel, stride, padding, ceil):
        words = kernel, x.shape[-2:], stride, padding, (1, 1)
        indices = torch.ops.prims._low_memory_max_pool_offsets_to_indices(offsets, *words)
        return aten.max_pool2d_with_indices_backward(gradient, x, kernel, stride, padding, (1, 1), ceil, indices)

    operator = pooling()

    def ours(same, gradient, x, offsets, kernel, stride, padding, ceil):
        return operator(gradient, x, kernel, stride, padding, (1, 1), ceil, offsets, same)

    expected = steps(own)
    for same, lanes in ((False, None), (True, 1)):
        for found, plain in zip(steps(partial(ours, same), lanes), expected, strict=True):
            assert torch.equal(found, plain) and torch.equal(found.signbit(), plain.signbit())
            assert found.stride() == plain.stride()


def test_which_pools_gradients_are_taken_from_offsets():
    """Not those of windows larger than stride and padding together, as 3 x 3 in steps of 2. ``max_pool2d(x, 2)`` has an
    empty stride in the graph."""
    torch.manual_seed(0)

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(3, 8, 3)

        def forward(self, x):
            x = F.max_pool2d(F.max_pool2d(self.convolution(x), 2), 3, 2)
            return F.max_pool2d(x, [3], [2], [1]).flatten(1)

    model, x, y = Pooled(), torch.randn(4, 3, 18, 18), torch.randint(8, (4,))

    def edit(pair):
        read = 4 * (4 * 8 * 16 * 16) * 1 + 4 * (4 * 8 * 3 * 3) * 4  # bytes, for each window over an element
        assert spared_s(pair, True, channels_last=False) == 0  # Inductor's own gradient is taken
        assert spared_s(pair, False, channels_last=False) == pytest.approx(1.5 * read / BYTES_A_S)
        assert spared_s(pair, True, channels_last=True) == pytest.approx(1.5 * read / BYTES_A_S)
        take_offsets(pair, True)
        assert len(pools(pair)) == 1 and spared_s(pair, False, channels_last=True) == 0
        found = pair.backward.graph.find_nodes(op="call_function", target=pooling())
        assert sorted(node.args[2] for node in found) == [[2, 2], [3, 3]]

    assert_same(run_edited(None, model, x, y), run_edited(edit, model, x, y))


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
