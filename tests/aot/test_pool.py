"""Machine code of the max-pool kernels: no spills, no barriers, wide accesses, instructions per input element.

Budgets: 18 instructions per element keep a bf16 copy memory-bound on an H200, 36 an fp32 one. A pool moves less than a
copy per input element (2.6 bytes of bf16 against 4), so these bound what it may cost and promise no speed.

On sm_80 a NaN's place takes two instructions more for two values (no 16-bit integer minimum), without a ReLU three, and
a maximum has two operands for three: 17.4 to 18.4 there after a ReLU, to 20.3 where that keeps -0.0, to 21.2 without
one (Triton 3.9 and 3.6). An A100 issues 0.58 times as many instructions a second as an H200 (108 x 1.41 GHz against
132 x 1.98, 128 a clock and multiprocessor both) and moves 0.4 times as many bytes (1.7 TB/s copied).
"""

import pytest

from gistkit.kernels.pool.backward import backward_kernel, backward_pairs_kernel, backward_quads_kernel
from gistkit.kernels.pool.forward import forward_kernel, forward_pairs_kernel
from gistkit.kernels.pool.operators import FORWARD_OUTPUTS, PAIRS, QUADS
from tests.aot.harness import CAPABILITIES, compile_kernel, per_element

BUDGET = {"fp32": 36, "bf16": 18, "fp16": 18}
VECTOR = {"fp32": 4, "bf16": 8, "fp16": 8}
BACKWARD_BUDGET = {2: 12, 3: 18}


def _compile(fn, dtype: str, capability: int, **constexprs):
    def kind(name: str) -> str:
        if name.endswith("_ptr"):
            return "*u8" if name == "codes_ptr" else "*" + dtype
        return "i64" if name.startswith("by_") else "i32"

    signature = {name: kind(name) for name in fn.arg_names if name not in constexprs}
    compiled = compile_kernel(fn, signature, constexprs, capability)
    assert compiled.stack_bytes == compiled.ptx.count(".f64") == 0
    return compiled


def _windows(k: int, p: int, stride: int | None = 2) -> dict[str, int]:
    windows = {"KH": k, "KW": k, "PH": p, "PW": p}
    return windows if stride is None else {**windows, "SH": stride, "SW": stride}


CODES = {"ZERO_CODE": True, "NONE": 15, "BITS": 4, "KEEP_ZERO": False}
# after a ReLU that makes +0 of -0.0, one that keeps it, none
RELUS = [(True, False), (True, True), (False, False)]
# the padded 3x3 window after a ReLU on every target, and after the others
FORWARDS = [
    (2, 0, "bf16", 90, *RELUS[0]), (3, 1, "fp32", 90, *RELUS[0]), (3, 1, "fp16", 90, *RELUS[0]),
    *((3, 1, "bf16", c, *RELUS[0]) for c in CAPABILITIES), (3, 1, "bf16", 90, *RELUS[1]), (3, 1, "bf16", 80, *RELUS[2]),
]  # fmt: skip
forwards = pytest.mark.parametrize(("k", "p", "dtype", "capability", "relu", "keep_zero"), FORWARDS)


def _forward_budget(k: int, dtype: str, capability: int, relu: bool, keep_zero: bool) -> float:
    if k == 2:
        return 13 if keep_zero else 12
    if dtype == "fp32":
        return 27
    if capability > 80:
        return 18
    return 21.2 if not relu else 20.3 if keep_zero else 18.4


def _reloads(k: int, dtype: str) -> int:
    """Loads an output, where its maximum was found: keys keep neither a NaN nor a zero's sign."""
    return int(k == 3 and dtype != "fp32")


@forwards
def test_forward_pairs(k, p, dtype, capability, relu, keep_zero):
    c = _compile(
        forward_pairs_kernel, dtype, capability,
        K=k, P=p, RELU=relu, CHECK=False, ALIGN=4, ASM=min(capability, 90), LANES=PAIRS,
        **{**CODES, "KEEP_ZERO": keep_zero},
    )  # fmt: skip
    assert c.barriers == c.shared_bytes == c.count("FMNMX") == 0, "a maximum would rewrite the payload of a NaN"
    assert per_element(c, PAIRS * 8) <= _forward_budget(k, dtype, capability, relu, keep_zero)
    per_lane = PAIRS // 128
    loads = (2 if k == 2 else 6) + 2 * _reloads(k, dtype)
    assert c.loads == per_lane * loads, "four columns in one access, the odd one, and what keys do not keep"
    assert dtype != "fp32" or c.loads_128 == per_lane * k


@pytest.mark.parametrize(
    "k, dtype, capability", [(2, "bf16", 90), (3, "fp32", 90), *((3, "bf16", c) for c in CAPABILITIES)]
)
def test_backward_pairs(k, dtype, capability):
    c = _compile(
        backward_pairs_kernel, dtype, capability,
        K=k, BITS=4, CHECK=False, ODD=False, PORTABLE=False, LANES=PAIRS,
    )  # fmt: skip
    assert c.barriers == c.shared_bytes == 0
    assert per_element(c, PAIRS * 8) <= BACKWARD_BUDGET[k]
    assert c.stores == PAIRS // 128 * 2, "four pixels of a row in one access"


@forwards
def test_forward_channels_last(k, p, dtype, capability, relu, keep_zero):
    v = VECTOR[dtype]
    c = _compile(
        forward_kernel, dtype, capability,
        CHANNELS_LAST=True, CHECK=p > 0, RELU=relu, UNROLL=True, ASM=min(capability, 90), V=v,
        LANES=FORWARD_OUTPUTS // v, **_windows(k, p), **{**CODES, "KEEP_ZERO": keep_zero},
    )  # fmt: skip
    assert c.barriers == c.count("FMNMX") == 0
    assert per_element(c, FORWARD_OUTPUTS * 4) <= _forward_budget(k, dtype, capability, relu, keep_zero)
    per_lane = FORWARD_OUTPUTS // 128 // v
    assert c.loads_128 == per_lane * (k * k + keep_zero)
    assert c.loads == c.loads_128 + per_lane * v * _reloads(k, dtype)


@pytest.mark.parametrize("k, p, dtype, capability", [(2, 0, "bf16", 80), (3, 1, "fp32", 90), (3, 1, "bf16", 90)])
def test_backward_channels_last(k, p, dtype, capability):
    v = VECTOR[dtype]
    c = _compile(
        backward_quads_kernel, dtype, capability,
        CHANNELS_LAST=True, CHECK=p > 0, BITS=4, ODD=False, PORTABLE=False, V=v, LANES=QUADS // v,
        **_windows(k, p, None),
    )  # fmt: skip
    assert c.barriers == 0
    assert per_element(c, QUADS * 4) <= BUDGET[dtype]
    assert c.stores == c.stores_128 == QUADS // 128 // v * 4


@pytest.mark.parametrize("channels_last", [False, True])
def test_general_kernels_compile_without_spills(channels_last):
    common = {"CHANNELS_LAST": channels_last, "V": 1, "LANES": 1024, "BITS": 8, **_windows(5, 2, 3)}
    codes = {"NONE": 255, "ZERO_CODE": True, "KEEP_ZERO": not channels_last, "ASM": 90}
    _compile(forward_kernel, "bf16", 90, RELU=True, CHECK=True, UNROLL=False, **codes, **common)
    _compile(backward_kernel, "bf16", 90, PORTABLE=False, **common)


def test_extents_of_one_become_constants():
    """Triton makes integer arguments equal to 1 compile-time constants: a plane of one pixel, a single group."""
    ones = {"inner_groups": 1, "height": 1, "width": 1, "out_height": 1, "out_width": 1}
    common = {"CHANNELS_LAST": True, "V": 1, "LANES": 1024, "BITS": 4}
    codes = {"RELU": True, "KEEP_ZERO": True, "ZERO_CODE": True, "NONE": 15, "ASM": 90}
    _compile(forward_kernel, "bf16", 90, CHECK=True, UNROLL=True, **_windows(3, 1), **codes, **common, **ones)
    _compile(
        backward_quads_kernel, "bf16", 90,
        PORTABLE=False, CHECK=True, ODD=True, quad_height=1, quad_width=1, **_windows(3, 1, None), **common, **ones,
    )  # fmt: skip
    pairs = {"row_pairs": 1, "out_height": 1, "K": 2, "CHECK": True, "LANES": 512, "BITS": 4}
    _compile(forward_pairs_kernel, "bf16", 90, P=0, ALIGN=4, width=1, **codes, **pairs)
    _compile(backward_pairs_kernel, "bf16", 90, ODD=True, PORTABLE=False, quad_height=1, height=1, **pairs)
