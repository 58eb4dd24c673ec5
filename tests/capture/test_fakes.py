"""What Fakes remembers of operators is what PyTorch's FakeTensorMode, asked each time, says."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gistkit.capture.fakes import Fakes

_aten = torch.ops.aten
_NORM = (None, None, None, None, True, 0.1, 1e-5)
CASES = {
    "fresh": lambda x: _aten.mul.Tensor(x, 2.0),
    "an int is no float": lambda x: (_aten.mul.Tensor(x.int(), 2), _aten.mul.Tensor(x.int(), 2.0)),
    "view": lambda x: _aten.view.default(x, [-1]),
    "unsafe view": lambda x: _aten._unsafe_view.default(x, [6, 16]),
    "views in a list": lambda x: _aten.split.Tensor(x, 1),
    "in place": lambda x: _aten.relu_.default(x),
    "changes geometry in place": lambda x: _aten.unsqueeze_.default(x, 0),
    "batch norm": lambda x: _aten.native_batch_norm.default(x, *_NORM),
    "batch norm, channels last": lambda x: _aten.native_batch_norm.default(
        x.contiguous(memory_format=torch.channels_last), *_NORM
    ),
    "a larger storage": lambda x: _aten.select.int(_aten.clone.default(x), 1, 0),
    "layer norm": lambda x: _aten.native_layer_norm.default(x, [4, 4], None, None, 1e-5),
}


def seen(mode, case):
    """Geometry of the results, and which of them lie on the operand's storage or are the operand."""
    with mode:
        x = torch.empty(2, 3, 4, 4)
        out = CASES[case](x)
        given = x.untyped_storage()

        def about(t):
            storage = t.untyped_storage()
            geometry = t.shape, t.stride(), t.dtype, t.device, t.storage_offset()
            return *geometry, storage.nbytes(), storage._cdata == given._cdata, t is x

        return [about(t) for t in (out if isinstance(out, (tuple, list)) else [out])]


@pytest.mark.parametrize("case", CASES)
def test_a_remembered_result_is_what_pytorch_says(case):
    expected = seen(FakeTensorMode(), case)
    assert [seen(Fakes(on_cpu=True), case) for _ in range(3)] == [expected] * 3


def test_no_gradient_of_a_batch_norms_input_that_needs_none_is_remembered_for_other_devices():
    found = {}
    for on_cpu in (True, False, True):
        with Fakes(on_cpu):
            x, c = torch.empty(2, 3, 4, 4), torch.empty(3)
            args = (x, x, c, None, None, c, c, True, 1e-5, [False, True, True])
            found[on_cpu] = _aten.native_batch_norm_backward.default(*args)[0]
    assert found[True] is None
    assert found[False] is not None


def layer_norm(x, grad):
    ones = torch.ones(4)
    _, *statistics = _aten.native_layer_norm.default(x, [4], ones, ones, 1e-5)
    return _aten.native_layer_norm_backward.default(grad, x, [4], *statistics, ones, ones, [True] * 3)[0]


def batch_norm(x, grad):
    _, *statistics = _aten.native_batch_norm.default(x, *_NORM)
    kept = None, None, None, *statistics
    return _aten.native_batch_norm_backward.default(grad, x, *kept, True, 1e-5, [True, False, False])[0]


@pytest.mark.parametrize("norm", [layer_norm, batch_norm])
@pytest.mark.parametrize("by_columns", ["none", "input", "gradient"])
def test_a_norms_gradient_lies_in_memory_as_a_real_one(norm, by_columns):
    """As autograd gives them: a gradient through a mean over the places of a permuted map lies by columns."""

    def made():
        found = []
        last = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
        for rows, columns in ((torch.ones(2, 3, 4), torch.ones(2, 4, 3).mT), (torch.ones(2, 3, 4, 4), last)):
            x, grad = (columns if by_columns == which else rows for which in ("input", "gradient"))
            found += [norm(x, grad).stride() for _ in range(2)]
        return found

    with Fakes(on_cpu=True):
        fake = made()
    assert fake == made()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_by_groups_is_of_any_dtype_as_a_mixture_of_experts_in_fp32_needs(dtype):
    """PyTorch's own fake operator refuses all but bf16."""

    def made():
        rows, experts = torch.ones(32, 16, dtype=dtype), torch.ones(4, 16, 64, dtype=dtype)
        ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
        rows.requires_grad_(), experts.requires_grad_()
        out = torch._grouped_mm(rows, experts, offs=ends)
        out.square().sum().backward()
        return [(t.shape, t.stride(), t.dtype) for t in (out, rows.grad, experts.grad)]

    with Fakes(on_cpu=True):
        fake = made()
    assert fake == made()
