"""batch_norm against PyTorch's own, bit for bit, and the rebuild of its output from its input."""

import pytest
import torch
import torch.nn.functional as F

from gistkit import functional
from gistkit.nn.keep import keep_coded
from gistkit.nn.norm import rebuild_candidates
from tests.support.nn_cases import DTYPES, LAYOUTS, assert_same, laid_out, planted, same_bits

SHAPES = [(4, 6, 5, 7), (4, 40, 3, 3), (9, 6), (3, 6, 8), (2, 3, 2, 3, 2)]
CASES = [
    (shape, dtype, parameters, layout)
    for shape in SHAPES
    for dtype, parameters in zip(DTYPES, ("same", "fp32", "none"), strict=True)
    for layout in ("contiguous", "permuted", *(["channels_last"] if len(shape) == 4 else []))
]
"""``parameters``: of the input's dtype, of fp32, or none."""
NEEDS = [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1)]


def _batch_norm(f, buffers=None, **options):
    """f as a function of (x, weight, bias) that puts copies of fresh running statistics into ``buffers``."""

    def call(x, weight=None, bias=None):
        dtype = x.dtype if weight is None else weight.dtype
        running = [torch.zeros(x.shape[1], dtype=dtype), torch.ones(x.shape[1], dtype=dtype)]
        y = f(x, *running, weight, bias, True, 0.3, 1e-4, **options)
        if buffers is not None:
            buffers.extend(running)
        return y

    return call


def _affine(channels, dtype):
    return [planted((channels,), dtype, False).requires_grad_() for _ in range(2)]


@pytest.mark.parametrize(("shape", "dtype", "parameters", "layout"), CASES)
def test_batch_norm(shape, dtype, parameters, layout):
    x = laid_out(planted(shape, dtype, False), layout).requires_grad_()
    affine = [] if parameters == "none" else _affine(shape[1], dtype if parameters == "same" else torch.float32)
    got, want = [], []
    own, plain = _batch_norm(functional.batch_norm, got), _batch_norm(F.batch_norm, want)
    for grad_layout in ("contiguous", "permuted"):
        assert_same(own, plain, [x, *affine], grad_layout=grad_layout, special=False)
    assert len(got) == 4 and all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("keep", [None, keep_coded("zvc")])
@pytest.mark.parametrize(
    ("layout", "needs"), [*((layout, NEEDS[0]) for layout in LAYOUTS), *(("contiguous", needs) for needs in NEEDS[1:])]
)
def test_special_values_layouts_coded_input_and_frozen_operands(layout, keep, needs):
    operands = [laid_out(planted((4, 6, 5, 7)), layout), *_affine(6, torch.float32)]
    operands = [x.detach().requires_grad_(bool(need)) for x, need in zip(operands, needs, strict=True)]
    assert_same(_batch_norm(functional.batch_norm, keep=keep), _batch_norm(F.batch_norm), operands)


def test_writing_to_the_input_in_between_raises():
    x = torch.ones(2, 3, 2, 2).requires_grad_()
    y = functional.batch_norm(z := x * 2, None, None, training=True)
    with torch.no_grad():
        z.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(("shape", "dtype", "parameters", "layout"), CASES)
def test_rebuild(shape, dtype, parameters, layout):
    x = laid_out(planted(shape, dtype, special=len(shape) == 3) * 3 + 1, layout).requires_grad_()
    affine = [None] * 2 if parameters == "none" else _affine(shape[1], dtype if parameters == "same" else torch.float32)
    y = F.batch_norm(x, None, None, *affine, training=True)
    stats = y.grad_fn._saved_result1, y.grad_fn._saved_result2
    with torch.no_grad():
        rebuilt = rebuild_candidates(x)[0](x, *stats, *affine)
    assert same_bits(rebuilt, y, nan_payloads=False)
