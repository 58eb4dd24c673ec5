"""Launches with all but their addresses ready, against the operators: the same bits the first time and later."""

import pytest
import torch

from gistkit.kernels import ops
from gistkit.kernels.launch import direct
from gistkit.kernels.layout import flat
from gistkit.nn.norm import kernel_factors
from gistkit.runtime.stash.verify import same_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((2, 16, 14, 14), (2, 16, 7, 7), (3, 5, 3, 3))


def drawn(shape, dtype, last=False, shift=0):
    """A dense tensor that begins ``shift`` elements after an aligned address."""
    n = torch.Size(shape).numel()
    x = torch.randn(n + shift, device="cuda").to(dtype)[shift:].view(shape)
    if not last:
        return x
    return x.view(shape[0], shape[2], shape[3], shape[1]).permute(0, 3, 1, 2)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks(dtype, shape, last):
    masks = direct.Masks(drawn(shape, dtype, last))
    for shift in (0, 0, 1, 0):
        x, grad = drawn(shape, dtype, last, shift), drawn(shape, dtype, last)
        values, bits = ops.relu_mask1(flat(x))
        y, mask = masks.relu(x)
        assert same_bits(flat(y), values) and torch.equal(mask, bits) and y.stride() == x.stride()
        assert same_bits(flat(masks.backward(grad, mask)), ops.mask1_backward(flat(grad), bits))
        other = drawn(shape, dtype, not last)  # a gradient of another layout is brought into x's, and masked there
        expected = torch.ops.aten.threshold_backward(other, y, 0)
        made = masks.backward(other, mask)
        assert same_bits(made, expected) and made.stride() == y.stride()
        assert torch.equal(masks.relu_(x), bits) and same_bits(flat(x), values)


@pytest.mark.parametrize("other_form", ["", "values", "fused"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rebuilds(dtype, shape, other_form):
    channels, plane = shape[1], shape[2] * shape[3]
    rebuilds = direct.Rebuilds(plane, "split", other_form)
    for shift in (0, 0, 1, 0):
        x, other = drawn(shape, dtype, shift=shift), drawn(shape, dtype)
        factors = [kernel_factors(*torch.rand(4, channels, device="cuda")) for _ in ("split", "fused")]
        there = other if other_form else None
        vectors = factors[1] if other_form == "fused" else []
        want = torch.empty_like(x)
        form = "fused" if vectors else ""
        ops.bn_rebuild(
            flat(x), factors[0], "split", plane, None if there is None else flat(there), vectors, form, True,
            flat(want),
        )  # fmt: skip
        assert same_bits(rebuilds(x, factors[0], there, vectors, torch.empty_like(x)), want)
        if there is not None:
            assert same_bits(rebuilds(x, factors[0], there, vectors, there), want)


def test_on_another_stream_and_under_a_dispatch_mode():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, masks = drawn((2, 16, 64, 64), torch.float32), None
    masks = direct.Masks(x)
    for _ in range(2):
        masks.relu(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        y = x * 2
        found = masks.relu(y)[0]
    stream.synchronize()
    assert same_bits(found, torch.relu(x * 2))
    with Watch():
        masks.relu(x)
    assert torch.ops.gistkit.relu_mask1.default in seen
