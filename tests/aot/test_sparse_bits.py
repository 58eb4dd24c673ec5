"""The compiled kernels of zvc and csr, run by tests/support/warp.py, against the oracle bit for bit.

Triton's interpreter has no inline assembly, of which these kernels are made; this is what a GPU runs, but for what
ptxas makes of it. tests/gpu/test_sparse.py has the last word.
"""

import numpy as np
import pytest
import torch

from gistkit.formats import ceil_div
from gistkit.kernels import STRIDES, bits_of
from gistkit.kernels.reference import sparse as reference
from gistkit.kernels.sparse import operators, zvc_launches
from gistkit.kernels.sparse.ends import ends_kernel
from gistkit.kernels.sparse.operators import CSR_SLOTS, UNBOUNDED
from gistkit.kernels.sparse.spill import columns_start, group_slots, spill_bytes, spill_origin
from tests.aot.harness import compile_kernel
from tests.aot.test_sparse import PROGRAM, READERS, compiled, packer
from tests.support.sparse_cases import EMPTY, PAYLOADS, SparseCase, decoded, relu_gradient, sparse_case
from tests.support.tensors import float_values, same_bits
from tests.support.warp import bases, launch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BOTH = pytest.mark.parametrize("codec", PAYLOADS)


def array(x: torch.Tensor) -> np.ndarray:
    bits = x if x.dtype == torch.int64 else bits_of(x)
    return bits.numpy().copy() if x.numel() else np.zeros(16, np.uint8)


def make_case(n: int, dtype: str, fmt: str, scaling: str, zeros: float) -> SparseCase:
    x = float_values(n, DTYPES[dtype], 3, zeros, False)
    x[5::97] = -0.0
    return sparse_case(x, float_values(n, DTYPES[dtype], 4, 0.1, False), fmt, scaling)


def redirected(counts: torch.Tensor, stride: int, capacity: int, distance: int) -> np.ndarray:
    """The slots' ends, on by ``distance`` items and less by the origin where their group's last one is too far."""
    ends, group = counts.cumsum(0, dtype=torch.int64), group_slots(stride)
    last = ends[torch.clamp(torch.arange(counts.numel()) // group * group + group, max=counts.numel()) - 1]
    return array(ends + torch.where(last > capacity, distance - spill_origin(capacity), 0))


@BOTH
@pytest.mark.parametrize("dtype, fmt, room, spill_first", [("bf16", "raw", 0.99, True), ("fp32", "fp8", 0.99, False)])
def test_spilled(codec, dtype, fmt, room, spill_first):
    """A group of 8192 in the arrays or not, and a short one: programs read one or the other, from one pointer each.
    Payload and spill by the oracle, ends redirected as these lie in the emulated memory."""
    case = make_case(9000, dtype, fmt, "none", 0.6)
    capacity = max(ceil_div(int((bits_of(case.x) != 0).sum() * room), 8) * 8, 8)
    n, stride = case.x.numel(), STRIDES[codec]
    index, counts, scratch = getattr(reference, f"{codec}_encode")(case.x, case.fmt)
    whole, item = counts.numel() * stride, scratch.element_size()
    spill = torch.full((spill_bytes(whole, capacity, item, codec == "csr"),), 7, dtype=torch.uint8)
    if codec == "zvc":
        values = reference.compact(scratch, counts, stride, capacity, spill)
    else:
        index, values = reference.csr_compact(index, scratch, counts, capacity, spill)
    payload = (index, counts, values, EMPTY)
    for grad in (False, True):
        out, behind = np.full_like(array(case.x), -1), np.zeros(0, np.uint8)
        if spill_first:
            # the first array's memory holds the spill as well: distances are negative
            behind = np.zeros(512 - out.nbytes % 512, np.uint8)
            behind = np.concatenate((behind, array(spill)))
        room = np.concatenate((out.view(np.uint8), behind)).view(out.dtype)
        octets, ends = array(index).view(np.uint8), array(counts.long())
        structure = [octets, array(counts), ends] if codec == "zvc" else [array(counts), ends, octets]
        arrays = [room, array(case.grad), *structure, array(values), array(EMPTY)]
        at = bases([*arrays, array(spill)])
        spill_at = at[0] + room.nbytes - spill.numel() if spill_first else at[-2]
        ends[:] = redirected(counts, stride, capacity, (spill_at - at[5]) // item)
        # zvc's kernels are those of any packed array, and know of no spill: it is only there
        numbers = [n, 0] if codec == "zvc" else [spill_at, n, capacity, columns_start(whole, capacity, item)]
        ptx = compiled(READERS[codec], dtype, fmt=case.fmt, spill=True, grad=grad).ptx
        launch(ptx, [*arrays, *numbers, array(spill)], ceil_div(n, PROGRAM))
        form = (case.fmt, "none", True, spill)
        expected = (relu_gradient if grad else decoded)(reference, case, (*payload, *form), codec)
        assert np.array_equal(room[:n], array(expected))


def test_packing_csr_with_a_spill():
    """To the byte what the oracle writes to the spill, and before it to the arrays."""
    case = make_case(9000, "bf16", "raw", "none", 0.6)
    columns, counts, scratch = reference.csr_encode(case.x, "raw")
    whole, item = counts.numel() * 256, scratch.element_size()
    capacity = max(ceil_div(int((bits_of(case.x) != 0).sum() * 0.99), 8) * 8, 8)
    spill = torch.full((spill_bytes(whole, capacity, item, True),), 7, dtype=torch.uint8)
    made = [np.full(capacity, 9, np.uint8), np.full(capacity, 9, array(scratch).dtype), array(spill)]
    ends = array(counts.long())
    arrays = [array(columns), array(scratch), array(counts), ends, *made]
    at = bases(arrays)
    ends[:] = redirected(counts, 256, capacity, (at[6] - at[5]) // item)
    numbers = [UNBOUNDED, counts.numel(), capacity, columns_start(whole, capacity, item)]
    ptx = packer(90, item, CSR_SLOTS, columns=True, spill=True, total="i64").ptx
    launch(ptx, [*arrays, *numbers], ceil_div(counts.numel(), CSR_SLOTS))
    expected = reference.csr_compact(columns, scratch, counts, capacity, spill)
    inside = int(counts[:32].sum())
    assert np.array_equal(made[2], array(spill))
    assert all(np.array_equal(a[:inside], array(b)[:inside]) for a, b in zip(made, expected, strict=False))


# runs of neighbours that end in the same slot, in the next, several slots on, and where a program's slots end
COUNTS = {
    1024: [1000, 0, 3, 1, 0, 1, 2, 1024, 7, 9, 0, 0, 1, 5, 64, 31, 0],
    256: [256, 0, 1, 31, 32, 33, 64, 65, 0, 255, 100, 3, 1, 1, 0, 2, *[7] * 17, 0, 5, 256],
}


KINDS = {torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"}
KINDS |= {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def emulated(kernel, programs, x, *args, **constexprs):
    """In place of launch_warps."""
    names = [name for name in kernel.arg_names if name not in constexprs]
    kinds = {n: KINDS[a.dtype] if isinstance(a, torch.Tensor) else "i32" for n, a in zip(names, args, strict=True)}
    code = compile_kernel(kernel, kinds, constexprs, 90, num_warps=1)
    arrays = [a.view(torch.uint8).numpy() if isinstance(a, torch.Tensor) and a.numel() else a for a in args]
    launch(code.ptx, [np.zeros(16, np.uint8) if isinstance(a, torch.Tensor) else a for a in arrays], programs)


def sums(counts, *_):
    return counts.cumsum(0, dtype=torch.int64)


@pytest.fixture
def device(monkeypatch):
    """The launchers as on sm_90, running sums by PyTorch."""
    for name, stand_in in (("launch_warps", emulated), ("asm_level", lambda x: 90), ("ends", sums)):
        monkeypatch.setattr(operators, name, stand_in)


@pytest.mark.parametrize(
    "codec, dtype, fmt, scaling, n",
    [
        ("csr", torch.bfloat16, "raw", "none", 2056),
        ("zvc", torch.float32, "raw", "none", 2003),  # elements are loaded one by one
        ("csr", torch.float32, "fp8", "none", 2056),
        ("zvc", torch.bfloat16, "fp10", "block", 1032),
        ("csr", torch.bfloat16, "fp16", "block", 1032),
    ],
)
def test_encoding_and_operators(codec, dtype, fmt, scaling, n, device):
    """The last slot is short."""
    stride = STRIDES[codec]
    case = sparse_case(float_values(n, dtype, 3, 0.5, False), float_values(n, dtype, 4, 0.1, False), fmt, scaling)
    expected = getattr(reference, f"{codec}_encode")(case.x, "raw" if scaling == "block" else fmt)
    made = getattr(operators, f"{codec}_encode")(case.x, "raw" if scaling == "block" else fmt)
    total = int(expected[1].sum())
    assert torch.equal(made[1], expected[1])
    assert same_bits(*(reference.compact(e[2], e[1], stride, total) for e in (made, expected)))
    for payload in PAYLOADS[codec](reference, case):
        whole = decoded(reference, case, payload, codec)
        assert same_bits(decoded(operators, case, payload, codec), whole)
        gradient = torch.empty_like(case.grad)  # of its own: the emulator copies what a launch is given
        getattr(operators, f"{codec}_relu_backward")(case.grad, *payload[:4], gradient, *payload[4:])
        assert same_bits(gradient, relu_gradient(reference, case, payload, codec))


class EmulatedReady:
    """In place of Ready: every launch is a first one."""

    def __init__(self, kernel, device, num_warps=4, dtypes=(), **constexprs):
        self._kernel, self._dtypes, self._constexprs = kernel, dtypes, constexprs

    def __call__(self, programs, numbers, *tensors):
        tensors = [t.view(dtype) for t, dtype in zip(tensors, self._dtypes, strict=True)]
        if self._kernel is not ends_kernel:
            return emulated(self._kernel, programs, tensors[0], *tensors, *numbers, **self._constexprs)
        counts, _, ends, _, _, total = tensors  # four warps; all of it has room in the arrays here
        ends.copy_(sums(counts))
        if self._constexprs["TOTAL"]:
            total.copy_(counts.sum())


@pytest.mark.parametrize("fmt, n", [("raw", 2003), ("fp8", 2056)])
def test_ready_launches_of_zvc(fmt, n, monkeypatch):
    monkeypatch.setattr(zvc_launches, "Ready", EmulatedReady)
    monkeypatch.setattr(zvc_launches, "asm_level", lambda x: 90)
    dtype = torch.float32  # as in the test above, whose kernels these are
    x, grad = float_values(n, dtype, 3, 0.5, False).nan_to_num(), float_values(n, dtype, 4, 0.1, False).nan_to_num()
    ready, total = zvc_launches.ZvcLaunches(n, dtype, x.device, fmt), torch.zeros((), dtype=torch.int64)
    made = ready.encode_within(x, 3 * 1024, torch.empty(0, dtype=torch.uint8), total)
    words, counts, scratch = reference.zvc_encode(x, fmt)
    assert int(total) == int(counts.sum()) and same_bits(made[0], words) and same_bits(made[1], counts)
    packed = (words, counts, reference.compact(scratch, counts, 1024, int(total)), made[3])
    assert same_bits(made[2][: int(total)], packed[2])
    form = (fmt, "none", True)
    assert same_bits(ready.decode(made, None, torch.empty_like(x)), reference.zvc_decode(*packed, n, dtype, *form))
    gradient = torch.empty_like(grad)
    reference.zvc_relu_backward(grad, *packed, gradient, *form)
    assert same_bits(ready.relu_backward(made, None, grad), gradient)


@pytest.mark.parametrize("stride, missing", [(1024, (0,)), (256, (1, 70))])
def test_packing(stride, missing, device):
    """More slots than a program has; to a total short of the end, past which the emulated warp lets nobody write."""
    counts = torch.tensor(COUNTS[stride], dtype=torch.int16)
    n, whole = counts.numel() * stride, int(counts.sum())
    values, columns = float_values(n, torch.float32, 2, 0.0, False).nan_to_num(), torch.randint(256, (n,)).byte()
    for total in (whole - m for m in missing):
        expected = reference.compact(values, counts, stride, whole)[:total]
        assert same_bits(operators.compact(values, counts, stride, total), expected)
        if stride == 256:
            made = operators.csr_compact(columns, values, counts, total)
            expected = (reference.compact(columns, counts, stride, whole)[:total], expected)
            assert all(same_bits(a, b) for a, b in zip(made, expected, strict=True))
