"""The rebuild kernel under Triton's interpreter, bit for bit against the oracle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.kernels.layout import FORMS
from gistkit.kernels.rebuild import rebuild as kernels
from gistkit.kernels.reference import rebuild as reference
from tests.support.rebuild_cases import SIZES, operands
from tests.support.tensors import FLOATS, plain_nan, positive_zeros, same_bits

# infinities minus infinities and products beyond the range: numpy reports what is meant to happen
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def rebuilt(call, x, *args):
    out = torch.empty_like(x)
    call(x, *args, out)
    return plain_nan(out)


@pytest.mark.parametrize("number, size", list(enumerate(SIZES)), ids=str)
def test_kernel_equals_the_oracle(number, size, monkeypatch):
    keep_zero = number % 2 == 0
    monkeypatch.setattr(kernels, "relu_keeps_negative_zero", lambda x: keep_zero)
    x, other, norm, second = operands(size, FLOATS[number % 3], sum(size))
    plane = size[2]
    for relu in (False, True) if keep_zero else (True,):  # without a ReLU there is nothing to keep
        for more in ((None, [], ""), (other, [], ""), (other, second, "fused")):
            args = (norm, "scaled", plane, *more, relu)
            want = rebuilt(reference.bn_rebuild, x, *args)
            want = positive_zeros(want) if relu and not keep_zero else want
            assert same_bits(rebuilt(kernels.bn_rebuild, x, *args), want)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(images=st.integers(1, 2), eights=st.integers(1, 3), plane=st.integers(8, 300))
def test_planes_across_rows(dtype, images, eights, plane):
    x, other, norm, second = operands((images, 8 * eights, plane), dtype, plane)
    args = (norm, "scaled", plane, other, second, "scaled", False)
    assert same_bits(rebuilt(kernels.bn_rebuild, x, *args), rebuilt(reference.bn_rebuild, x, *args))


def test_the_reciprocal_of_a_long_plane_is_too_large(monkeypatch):
    monkeypatch.setattr(kernels, "ACROSS_ROWS", 4096)  # fewer programs: each takes the interpreter its time
    # one row before the end of the seventh plane the product with 2**32 / plane, rounded up, says seven
    plane = 25335
    assert (7 * plane - 1) % 8 == 0 and (7 * plane - 1) * (2**32 // plane + 1) >> 32 == 7
    x, _, norm, _ = operands((1, 8, plane), torch.bfloat16, 1)
    args = (norm, "fused", plane, None, [], "", False)
    assert same_bits(rebuilt(kernels.bn_rebuild, x, *args), rebuilt(reference.bn_rebuild, x, *args))


@pytest.mark.parametrize("dtype, plane", [(torch.float32, 96), (torch.bfloat16, 99), (torch.float16, 96)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_rounds_as_written(dtype, form, plane):
    x, other, norm, second = operands((2, 24, plane), dtype, 5)
    for more in ((None, [], ""), (other, second, form)):
        args = (norm, form, plane, *more, False)
        assert same_bits(rebuilt(kernels.bn_rebuild, x, *args), rebuilt(reference.bn_rebuild, x, *args))


@dtypes
@pytest.mark.parametrize("keep_zero", [False, True])
def test_negative_zeros_are_what_relu_makes_of_them(dtype, keep_zero, monkeypatch):
    monkeypatch.setattr(kernels, "relu_keeps_negative_zero", lambda x: keep_zero)
    # x is the mean, the weight negative, the bias -0.0: fma(-0.0, 1/std, -0.0)
    norm = [torch.ones(4), torch.ones(4), torch.full((4,), -1.0), torch.full((4,), -0.0)]
    x, zeros = torch.ones(96, dtype=dtype), torch.full((96,), -0.0, dtype=dtype)
    assert rebuilt(kernels.bn_rebuild, x, norm, "scaled", 8, None, [], "", False).signbit().all()
    for other in (None, zeros):
        y = rebuilt(kernels.bn_rebuild, x, norm, "scaled", 8, other, [], "", True)
        assert not y.any() and y.signbit().all() == keep_zero


def test_the_forms_differ():
    x, _, norm, _ = operands((2, 24, 96), torch.float32, 5)
    found = [rebuilt(kernels.bn_rebuild, x, norm, f, 96, None, [], "", False) for f in FORMS]
    assert not any(same_bits(a, b) for i, a in enumerate(found) for b in found[:i])


@pytest.mark.parametrize("into", ["x", "other"])
def test_the_result_may_lie_in_an_operand(into):
    x, other, norm, _ = operands((2, 5, 49), torch.bfloat16, 3)
    args = (norm, "scaled", 49, other, [], "", True)
    want = rebuilt(reference.bn_rebuild, x, *args)
    x, other = x.clone(), other.clone()
    out = x if into == "x" else other
    kernels.bn_rebuild(x, norm, "scaled", 49, other, [], "", True, out)
    assert same_bits(plain_nan(out), want)
