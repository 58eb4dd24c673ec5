"""The Triton max-pool kernels in the interpreter against the oracle, bit for bit.

One known difference is taken out of the oracle's side: its sums are made in fp32, as CUDA's and the kernels' are
(tests/gpu compares with CUDA's own results).
"""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.kernels.pool import geometry
from gistkit.kernels.pool import operators as pool
from gistkit.kernels.pool.tiles import divide, divisor
from tests.support.kernel_laws import assert_pool_backward, assert_pool_forward
from tests.support.pool_cases import COMMON_WINDOWS, PoolCase, any_bits, bits_named, pool_cases, values

KEYED = (*COMMON_WINDOWS[1:], ((3, 3), (1, 2), (1, 1)), ((2, 3), (2, 2), (0, 1)))


def check(case: PoolCase) -> None:
    # a ReLU that gives +0 for -0.0, and one that keeps it
    for keep_zero in (False, True) if case.relu else (True,):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool, "relu_keeps_negative_zero", lambda x, answer=keep_zero: answer)
            y, codes = assert_pool_forward(pool, case, "cpu", keep_zero)
    assert_pool_backward(pool, case, y, codes)


@settings(max_examples=30)
@given(pool_cases())
def test_kernels_equal_the_oracle(case):
    check(case)


@settings(max_examples=5)
@given(pool_cases(max_size=8))
def test_parts_of_the_batch_equal_the_oracle(case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geometry, "launch_images", lambda elements: 2)
        check(case)


def _case(
    shape, windows, dtype=torch.bfloat16, layout=torch.contiguous_format, zero_code=True, bits=4, ceil_mode=False
):
    x = values(shape, dtype, 0.05, 3).contiguous(memory_format=layout)
    return PoolCase(x, windows, ceil_mode, True, zero_code, bits)


@pytest.mark.parametrize(
    "case, kernels",
    [
        (_case((1, 2, 8, 8), COMMON_WINDOWS[0]), {"_launch_pairs", "_launch_backward_pairs"}),
        (_case((1, 3, 9, 12), COMMON_WINDOWS[2], torch.float32), {"_launch_pairs", "_launch_backward_pairs"}),
        (_case((1, 2, 13, 13), COMMON_WINDOWS[1]), {"_launch_pairs", "_launch_quads"}),
        (_case((1, 2, 7, 8), COMMON_WINDOWS[0], ceil_mode=True), {"_launch_pairs", "_launch_backward_pairs"}),
        (_case((2, 16, 6, 6), COMMON_WINDOWS[2], layout=torch.channels_last), {"_launch_forward", "_launch_quads"}),
        (_case((1, 1, 18, 20), ((5, 4), (3, 2), (2, 2)), bits=8), {"_launch_forward", "_launch_backward"}),
    ],
)
def test_each_kernel_runs_where_it_should(case, kernels, monkeypatch):
    ran = set()
    for name in ("_launch_pairs", "_launch_forward", "_launch_backward_pairs", "_launch_quads", "_launch_backward"):
        launch = getattr(pool, name)
        monkeypatch.setattr(pool, name, lambda *args, n=name, f=launch: (ran.add(n), f(*args))[1])
    check(case)
    assert ran == kernels


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_window_of_zeros_names_its_first_position_inside(layout):
    case = _case((2, 4, 9, 10), ((3, 3), (1, 2), (1, 1)), layout=layout, zero_code=False)
    check(replace(case, x=-case.x.abs()))


@pytest.mark.parametrize(
    "shape, windows, layout",
    [
        ((1, 3, 40, 40), COMMON_WINDOWS[0], torch.contiguous_format),
        ((1, 8, 26, 26), COMMON_WINDOWS[2], torch.channels_last),
        # an odd number of outputs a plane (169, 81): the second program's first code is in a high nibble
        ((2, 7, 27, 27), COMMON_WINDOWS[1], torch.contiguous_format),
        ((2, 7, 27, 27), ((3, 3), (3, 3), (0, 0)), torch.contiguous_format),
    ],
)
def test_several_programs(shape, windows, layout):
    check(_case(shape, windows, layout=layout))


def test_nan_keeps_its_payload():
    x = torch.zeros(1, 1, 2, 4, dtype=torch.bfloat16)
    x.view(torch.int16)[0, 0, 1] = torch.tensor([0x7FA5, 0, -0x003B, 0], dtype=torch.int16)
    y, _ = pool.maxpool_forward(x, *COMMON_WINDOWS[0], False, True, True, 4)
    assert y.view(torch.int16).flatten().tolist() == [0x7FA5, -0x003B]


@pytest.mark.parametrize("windows", KEYED)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "relu, keep_zero, dtype",
    [(False, False, torch.bfloat16), (True, False, torch.float16), (True, True, torch.bfloat16)],
)
def test_16_bit_maxima_are_the_bits_of_the_input(relu, keep_zero, dtype, layout, windows, monkeypatch):
    """Windows compared by keys: the oracle's codes and, payloads and zeros' signs included, the bits that they name."""
    monkeypatch.setattr(pool, "relu_keeps_negative_zero", lambda x: keep_zero)
    x = any_bits((1, 8, 16, 24), dtype, 5).contiguous(memory_format=layout)
    case = PoolCase(x, windows, False, relu, relu, 8)
    y, codes = assert_pool_forward(pool, case, "cpu", keep_zero)
    # where the ReLU stops a window no code names the zero
    assert keep_zero or torch.equal(y.contiguous().view(torch.int16), bits_named(case, codes, y))


@triton.jit
def _divide_kernel(n_ptr, q_ptr, r_ptr, d, by, LANES: tl.constexpr):
    offs = tl.arange(0, LANES)
    quotient, remainder = divide(tl.load(n_ptr + offs), d, by)
    tl.store(q_ptr + offs, quotient)
    tl.store(r_ptr + offs, remainder)


@given(st.integers(1, 2**31 - 1) | st.sampled_from([1, 2, 3, 7, 112, 2**30, 2**30 + 1]), st.integers(0, 2**20))
def test_division_by_multiplication_is_exact(d, seed):
    n = torch.randint(2**31 - 1, (64,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    multiples = [m for k in (1, 2, (2**31 - 1) // d) for m in (k * d - 1, k * d) if m < 2**31]
    n[: len(multiples) + 2] = torch.tensor([0, 2**31 - 1, *multiples])
    quotient, remainder = torch.empty_like(n), torch.empty_like(n)
    _divide_kernel[(1,)](n, quotient, remainder, d, divisor(d), LANES=64)
    assert torch.equal(quotient, n // d) and torch.equal(remainder, n % d)
