"""What the launchers of zvc and csr hand to their kernels: the compiled kernels, run in the emulated warp by the
launchers' own arguments, against the oracle."""

import numpy as np
import pytest
import torch

from gistkit.kernels import STRIDES
from gistkit.kernels.reference import sparse as reference
from gistkit.kernels.sparse import operators, zvc_launches
from gistkit.kernels.sparse.ends import ends_kernel
from tests.aot.harness import compile_kernel
from tests.support.sparse_cases import PAYLOADS, decoded, relu_gradient, sparse_case
from tests.support.tensors import float_values, same_bits
from tests.support.warp import launch

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

    def __init__(self, kernel, device, num_warps=4, **constexprs):
        self._kernel, self._constexprs = kernel, constexprs

    def at(self, *_):
        return False

    def first(self, programs, tensors, numbers):
        if self._kernel is not ends_kernel:
            return emulated(self._kernel, programs, tensors[0], *tensors, *numbers, **self._constexprs)
        counts, _, ends, _, _, total = tensors  # four warps; all of it has room in the arrays here
        ends.copy_(sums(counts))
        if self._constexprs["TOTAL"]:
            total.copy_(counts.sum())


@pytest.mark.parametrize("dtype, fmt, n", [(torch.bfloat16, "raw", 2003), (torch.float32, "fp8", 2056)])
def test_ready_launches_of_zvc(dtype, fmt, n, monkeypatch):
    monkeypatch.setattr(zvc_launches, "Ready", EmulatedReady)
    monkeypatch.setattr(zvc_launches, "asm_level", lambda x: 90)
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


@pytest.mark.parametrize("stride", STRIDES.values())
def test_packing(stride, device):
    counts = torch.tensor([stride, 0, 3, 70, 1, 0, 9], dtype=torch.int16)
    values = float_values(7 * stride, torch.float32, 2, 0.0, False).nan_to_num()
    columns, total = torch.randint(0, 256, (7 * stride,), dtype=torch.uint8), int(counts.sum())
    assert same_bits(operators.compact(values, counts, stride, total), reference.compact(values, counts, stride, total))
    if stride == 256:
        made = operators.csr_compact(columns, values, counts, total)
        expected = reference.csr_compact(columns, values, counts, total)
        assert all(same_bits(a, b) for a, b in zip(made, expected, strict=True))
