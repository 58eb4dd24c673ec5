"""conv2d and linear against PyTorch's own, bit for bit: outputs, gradients, strides, what is kept and for how long."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from gistkit import functional
from gistkit.nn.keep import keep_coded, keep_dense
from gistkit.nn.standin import Geometry, StandIn
from gistkit.runtime.live import LiveBytes
from tests.support.nn_cases import LAYOUTS, assert_same, laid_out, planted

# batch, channels in and out, kernel, then stride, padding, dilation, groups
CONVOLUTIONS = {
    "3x3": ((2, 4, 6, 3), (1, 1, 1, 1)), "1x1": ((3, 4, 6, 1), (1, 0, 1, 1)), "strided": ((2, 4, 6, 5), (2, 2, 1, 1)),
    "dilated": ((2, 4, 6, 3), (1, 2, 2, 1)), "grouped": ((2, 4, 8, 3), (2, 1, 1, 2)),
    "depthwise": ((2, 4, 4, 3), (1, 1, 1, 4)), "depthwise dilated": ((2, 4, 4, 3), (1, 2, 2, 4)),
    "large batch": ((17, 8, 8, 3), (1, 1, 1, 1)), "one channel": ((2, 1, 4, 3), (1, 1, 1, 1)),
    "uneven": ((2, 4, 6, (3, 2)), ((2, 1), (0, 1), (1, 2), 1)), "same": ((2, 4, 6, 3), (1, "same", 2, 1)),
    "same, uneven": ((2, 4, 6, (2, 4)), (1, "same", 1, 1)), "valid": ((2, 4, 6, 3), (2, "valid", 1, 1)),
}  # fmt: skip
LINEARS = [(4, 5), (1, 5), (5,), (2, 4, 5), (2, 3, 4, 5), (0, 5), (2, 0, 5), (7, 1)]


def _operands(case, dtype, x_layout="contiguous", weight_layout="contiguous", bias=True, special=False):
    (n, c, o, k), (*_, groups) = CONVOLUTIONS[case]
    kernel = k if isinstance(k, tuple) else (k, k)
    x = laid_out(planted((n, c, 9, 8), dtype, special), x_layout)
    weight = laid_out(planted((o, c // groups, *kernel), dtype, special), weight_layout)
    return [x.requires_grad_(), weight.requires_grad_(), planted((o,), dtype).requires_grad_() if bias else None]


def _pair(case, **options):
    where = CONVOLUTIONS[case][1]
    return (lambda x, w, b: functional.conv2d(x, w, b, *where, **options)), (lambda x, w, b: F.conv2d(x, w, b, *where))


@pytest.fixture(autouse=True)
def _quiet(recwarn):
    """PyTorch warns once of the copy that uneven "same" padding makes."""


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize(
    ("dtype", "x_layout", "weight_layout"),
    [(torch.float32, "channels_last", "channels_last"), (torch.bfloat16, "contiguous", "contiguous"),
     (torch.float16, "contiguous", "channels_last")],
)  # fmt: skip
def test_conv2d(case, dtype, x_layout, weight_layout):
    operands = _operands(case, dtype, x_layout, weight_layout, bias=dtype != torch.float16)
    for grad_layout in ("contiguous", "channels_last", "expanded"):
        assert_same(*_pair(case), operands, grad_layout=grad_layout, special=False)


@pytest.mark.parametrize(
    ("case", "x_layout"),
    [("3x3", "contiguous"), ("grouped", "channels_last"), ("depthwise dilated", "contiguous"),
     ("large batch", "contiguous"), ("same, uneven", "channels_last")],
)  # fmt: skip
def test_conv2d_without_onednn(case, x_layout):
    with torch.backends.mkldnn.flags(enabled=False):
        assert_same(*_pair(case), _operands(case, torch.float32, x_layout), special=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_conv2d_of_any_layout_with_special_values(layout):
    assert_same(*_pair("3x3"), _operands("3x3", torch.float32, layout, special=True))


@pytest.mark.parametrize("needs", [(x, w, b) for x in (0, 1) for w in (0, 1) for b in (0, 1)])
@pytest.mark.parametrize(
    ("case", "layout", "onednn"),
    [("3x3", "contiguous", True), ("3x3", "channels_last", False), ("grouped", "channels_last", True)],
)
def test_conv2d_keeps_its_input_only_where_a_parameter_needs_it(needs, layout, onednn, case):
    asked = []

    def keep(x):
        asked.append(x)
        return keep_dense(x)

    operands = _operands(case, torch.float32, layout)
    for x, need in zip(operands, needs, strict=True):
        x.requires_grad_(bool(need))
    with torch.backends.mkldnn.flags(enabled=onednn):
        if any(needs):
            assert_same(*_pair(case, keep=keep), operands, special=False)
    assert len(asked) == int(any(needs[1:]))


@pytest.mark.parametrize(
    ("codec", "layout"), [("zvc", "contiguous"), ("csr", "channels_last"), ("dense", "contiguous")]
)
def test_coded_inputs(codec, layout):
    operands = _operands("3x3", torch.float32, layout)
    keep = keep_coded(codec)
    rectified = lambda f: lambda x, w, b: f(F.relu(x), w, b)  # noqa: E731
    own, plain = _pair("3x3", keep=keep)
    assert_same(rectified(own), rectified(plain), operands)
    flat = [planted((6, 5)).requires_grad_(), planted((4, 5)).requires_grad_(), None]
    assert_same(lambda *t: functional.linear(*t, keep=keep), F.linear, flat)


@pytest.mark.parametrize("shape", LINEARS)
@pytest.mark.parametrize(
    ("dtype", "bias", "special"),
    [(torch.float32, True, True), (torch.bfloat16, False, False), (torch.float16, True, False)],
)
def test_linear(shape, dtype, bias, special):
    parameters = [planted((3, shape[-1]), dtype, special).requires_grad_()]
    parameters.append(planted((3,), dtype, special).requires_grad_() if bias else None)
    assert_same(functional.linear, F.linear, [planted(shape, dtype, special).requires_grad_(), *parameters])


@pytest.mark.parametrize(
    ("layout", "shape", "needs"),
    [*((layout, shape, (1, 1, 1)) for layout in ("permuted", "sliced", "expanded") for shape in ((6, 5), (3, 6, 5))),
     *(("permuted", (6, 5), needs) for needs in ((1, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 1)))],
)  # fmt: skip
def test_linear_layouts_and_frozen_operands(layout, shape, needs):
    for column_major in (False, True):
        weight = planted((5, 4)).t() if column_major else planted((4, 5))
        operands = [laid_out(planted(shape), layout), weight, planted((4,))]
        operands = [x.requires_grad_(bool(need)) for x, need in zip(operands, needs, strict=True)]
        for grad_layout in ("contiguous", "permuted"):
            assert_same(functional.linear, F.linear, operands, grad_layout=grad_layout)


@pytest.mark.parametrize("op", ["conv2d", "linear"])
def test_the_decoded_input_is_gone_before_the_input_gradient(op):
    n, c, size = 4, 16, 32
    x = F.relu(planted((n, c, size, size), special=False)).requires_grad_()
    if op == "linear":
        x = x.detach().view(-1, 64).requires_grad_()
    weight = planted((c, c, 3, 3) if op == "conv2d" else (64, 64), special=False).requires_grad_()
    where = {"padding": 1} if op == "conv2d" else {}
    y = getattr(functional, op)(x, weight, keep=keep_coded("zvc"), **where)
    grad = torch.ones_like(y)
    with LiveBytes() as live:
        y.backward(grad)
    # at no time do the decoded input and the input gradient exist together
    nbytes, slack = x.numel() * 4, weight.numel() * 8
    assert nbytes <= live.peak_bytes <= nbytes + slack


def test_a_stand_in_is_empty_only_where_its_backend_takes_it_as_it_is():
    x = planted((17, 8, 9, 8), special=False)
    for rows, groups, onednn in ((17, 1, True), (17, 2, True), (4, 1, False)):  # NNPACK takes 16 rows and more
        weight, geometry = planted((8, 8 // groups, 3, 3), special=False), Geometry((1, 1), (1, 1), (1, 1), groups)
        with torch.backends.mkldnn.flags(enabled=onednn):
            made = StandIn.of(x[:rows], weight, geometry).tensor(weight, geometry)
        assert made.untyped_storage().nbytes() == 0
    weight, geometry = planted((8, 4, 3, 3), special=False), Geometry((1, 1), (1, 1), (1, 1), 2)
    stand_in = StandIn.of(x, weight, geometry)
    # both would be copied before use: another layout, another backend
    turned = laid_out(weight, "channels_last")
    assert stand_in.tensor(turned, geometry).data_ptr() == turned.data_ptr()
    with torch.backends.mkldnn.flags(enabled=False):
        assert stand_in.tensor(weight, geometry).data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("op", ["conv2d", "linear"])
def test_the_input_is_freed_by_its_backward(op):
    x = planted((2, 3, 8, 8), special=False).requires_grad_()
    z = x * 2 if op == "conv2d" else (x * 2).view(-1, 8)
    weight = planted((4, 3, 3, 3) if op == "conv2d" else (5, 8), special=False).requires_grad_()
    memory = weakref.ref(z.untyped_storage())
    y = functional.conv2d(z, weight) if op == "conv2d" else functional.linear(z, weight)
    kept = y.grad_fn.kept[0]
    storage = weakref.ref(kept.dense())
    del z, kept
    gc.collect()
    assert storage() is not None
    y.sum().backward()
    assert storage() is None and memory() is None


@pytest.mark.parametrize("op", ["conv2d", "linear"])
def test_writing_to_an_operand_in_between_raises(op):
    for written in range(2):
        x = planted((2, 3, 8, 8), special=False).requires_grad_()
        z = x * 2
        weight = planted((4, 3, 3, 3) if op == "conv2d" else (5, 8), special=False).requires_grad_()
        y = getattr(functional, op)(z, weight)
        with torch.no_grad():
            (z, weight)[written].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_gradient_that_is_not_contiguous_goes_before_the_weights():
    """As in PyTorch: its copy stands in for it."""
    peaks = []
    for f in (functional.linear, F.linear):
        torch.manual_seed(0)
        x, w = torch.randn(4, 8, 64, requires_grad=True), torch.randn(1000, 64, requires_grad=True)
        with LiveBytes(timeline=False) as live:
            F.cross_entropy(f(x, w).transpose(1, 2), torch.zeros(4, 8, dtype=torch.long)).backward()
        peaks.append(live.peak_bytes)
    assert peaks[0] <= peaks[1]
