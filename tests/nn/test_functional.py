"""relu, max_pool2d, relu_max_pool2d and dropout against PyTorch's own, bit for bit."""

import gc
import weakref

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from gistkit import functional
from gistkit.codecs import CODECS
from tests.support.nn_cases import DTYPES, LAYOUTS, assert_same, laid_out, planted, same_bits

GRAD_LAYOUTS = ("contiguous", "channels_last", "expanded")
POOLS = [
    (2, None, 0, 1, False), (3, 2, 1, 1, False), (3, 2, 1, 1, True), (3, 1, 1, 2, False),
    ((2, 3), (1, 2), (1, 0), 1, True), (4, 4, 0, 1, False), (4, 2, 2, 1, True),
    (5, 3, 2, 1, False), ([2], [2], [0], [1], True), (2, [], 0, 1, False),
]  # fmt: skip


def _leaf(shape, dtype=torch.float32, layout="contiguous", special=True):
    return laid_out(planted(shape, dtype, special), layout).requires_grad_()


@pytest.mark.parametrize(
    ("dtype", "layout"), [*((torch.float32, layout) for layout in LAYOUTS), *((d, "channels_last") for d in DTYPES[1:])]
)
def test_relu(dtype, layout):
    x = _leaf((3, 5, 4, 7), dtype, layout)
    for grad_layout in GRAD_LAYOUTS:
        assert_same(functional.relu, F.relu, [x], grad_layout=grad_layout)
        # the factor makes x no leaf, so that it may be overwritten
        own, plain = (lambda t, f=f: f(t * 1, True) for f in (functional.relu, F.relu))
        assert_same(own, plain, [x], grad_layout=grad_layout)


@settings(max_examples=25)
@given(shape=st.lists(st.integers(0, 6), max_size=5), inplace=st.booleans(), dtype=st.sampled_from(DTYPES))
def test_relu_and_dropout_of_any_shape(shape, inplace, dtype):
    x = planted(shape, dtype).requires_grad_()
    for name in ("relu", "dropout"):
        own, plain = getattr(functional, name), getattr(F, name)
        assert_same(lambda t, f=own: f(t * 1, inplace=inplace), lambda t, f=plain: f(t * 1, inplace=inplace), [x])


@pytest.mark.parametrize(
    ("codec", "inplace", "layout"),
    [("zvc", False, "contiguous"), ("zvc", True, "channels_last"), ("csr", False, "channels_last"),
     ("dense", True, "contiguous"), ("mask1", False, "contiguous")],
)  # fmt: skip
def test_relu_with_keep(codec, inplace, layout):
    kept = []

    def keep(y):
        assert not torch.is_grad_enabled()
        kept.append(functional.keep_coded(codec)(y))
        return kept[-1]

    x = _leaf((3, 5, 4, 7), layout=layout)
    assert_same(lambda t: functional.relu(t * 1, inplace, keep=keep), lambda t: F.relu(t * 1), [x])
    assert len(kept) == 1
    if CODECS[codec].lossless:
        assert same_bits(kept[0].dense(), F.relu(x.detach()))


def test_relu_in_place_returns_its_input_and_counts_a_version():
    x = _leaf((4, 4))
    z = x * 2
    y = functional.relu(z, inplace=True)
    assert y is z and y._version > 0
    # a reader of z from before sees that it was overwritten
    w = x * 2
    cube = w.pow(3)
    functional.relu(w, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cube.sum().backward()


@pytest.mark.parametrize("f", [functional.relu, functional.dropout])
def test_in_place_on_a_leaf_raises_before_writing(f):
    x = _leaf((4, 4), special=False)
    before = x.detach().clone()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        f(x, inplace=True)
    assert torch.equal(x, before)


@pytest.mark.parametrize("view", [lambda z: z[:, 1:], lambda z: z[1:], lambda z: z.view(-1)])
@pytest.mark.parametrize("name", ["relu", "dropout"])
def test_in_place_on_views(name, view):
    def through_view(f, **options):
        def run(t):
            z = t * 1
            f(view(z), inplace=True, **options)
            return z

        return run

    own, plain = getattr(functional, name), getattr(F, name)
    assert_same(through_view(own), through_view(plain), [_leaf((3, 5, 4, 7))])
    if name == "relu":
        assert_same(through_view(own, keep=functional.keep_dense), through_view(plain), [_leaf((3, 5, 4, 7))])


@pytest.mark.parametrize("f", [functional.relu, lambda x: functional.max_pool2d(x, 2), functional.dropout])
def test_results_may_be_modified_in_place(f):
    x = _leaf((2, 4, 6, 6), special=False)
    f(x).add_(1.0).mul_(x.detach().new_tensor(2.0)).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("windows", POOLS)
@pytest.mark.parametrize(
    ("dtype", "layout", "grad_layout"),
    [(torch.float32, "contiguous", "channels_last"), (torch.float32, "sliced", "contiguous"),
     (torch.bfloat16, "channels_last", "channels_last")],
)  # fmt: skip
def test_pools(windows, dtype, layout, grad_layout):
    x = _leaf((2, 3, 11, 10), dtype, layout)
    assert_same(lambda t: functional.max_pool2d(t, *windows), lambda t: F.max_pool2d(t, *windows), [x])

    def plain(t):
        return F.max_pool2d(torch.relu(t), *windows)

    def mask_in_codes(t):
        return functional.max_pool2d(functional.relu(t, mask_in_pool=True), *windows, mask_in_pool=True)

    # PyTorch's bf16 and fp16 ReLU backward rewrites the payload of a NaN gradient; here no ReLU backward runs
    options = {"grad_layout": grad_layout, "nan_payloads": dtype == torch.float32}
    assert_same(lambda t: functional.relu_max_pool2d(t, *windows), plain, [x], **options)
    assert_same(mask_in_codes, plain, [x], **options)


@pytest.mark.parametrize("shape", [(3, 6, 7), (2, 1, 6, 7), (2, 5, 1, 1), (1, 1, 6, 1), (1, 4, 2, 9)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_pool_strides_where_sizes_are_one(shape, layout):
    x = planted(shape)
    if layout == "channels_last":
        *_, c, h, w = shape
        x = torch.empty_strided(shape, (h * w * c, 1, w * c, c)[-len(shape) :]).copy_(x)
    args = ((1, 1), (1, 1), 0, 1, True) if 1 in shape[-2:] else (2, 1, 1)
    assert_same(lambda t: functional.max_pool2d(t, *args), lambda t: F.max_pool2d(t, *args), [x.requires_grad_()])


@pytest.mark.parametrize("windows", [(17, 8, 8), (16, 8, 8)])
def test_windows_beyond_the_codes(windows):
    # below zero by about the maximum of a window, so that some windows have a positive maximum and some have none
    x = (planted((1, 2, 33, 34), special=False) - 3).requires_grad_()
    assert 0 < (F.max_pool2d(x, *windows) > 0).float().mean() < 1
    plain = lambda t: F.max_pool2d(torch.relu(t), *windows)  # noqa: E731
    assert_same(lambda t: functional.max_pool2d(t, *windows), lambda t: F.max_pool2d(t, *windows), [x])
    assert_same(lambda t: functional.relu_max_pool2d(t, *windows), plain, [x])
    mask_in_codes = lambda t: functional.max_pool2d(functional.relu(t, mask_in_pool=True), *windows, mask_in_pool=True)  # noqa: E731
    assert_same(mask_in_codes, plain, [x])


@pytest.mark.parametrize(
    ("p", "dtype", "layout"),
    [*((p, torch.float32, "contiguous") for p in (0.0, 0.1, 1.0)), (0.9, torch.float32, "sliced"),
     *((1 / 3, dtype, "channels_last") for dtype in DTYPES)],
)  # fmt: skip
@pytest.mark.parametrize("inplace", [False, True])
def test_dropout(p, dtype, layout, inplace):
    x = _leaf((3, 5, 4, 7), dtype, layout)
    for grad_layout in GRAD_LAYOUTS:
        own, plain = (lambda t, f=f: f(t * 1, p, True, inplace) for f in (functional.dropout, F.dropout))
        assert_same(own, plain, [x], grad_layout=grad_layout)


def _held_bytes(node) -> int:
    """Bytes of the tensors that a node's hold reaches."""
    gc.collect()
    found = {}
    todo = [node.kept]
    while todo:
        item = todo.pop()
        if isinstance(item, torch.Tensor):
            found[item.untyped_storage()._cdata] = item.untyped_storage().nbytes()
        elif isinstance(item, (list, tuple)):
            todo.extend(item)
        elif hasattr(item, "encoded"):
            todo.extend(item.encoded.payload)
    return sum(found.values())


def test_bytes_kept_and_outputs_freed():
    x = _leaf((4, 3, 16, 16))
    n = x.numel()
    y = functional.relu(x)
    z = functional.max_pool2d(y, 2)
    assert _held_bytes(y.grad_fn) == n // 8
    assert _held_bytes(z.grad_fn) == n // 4 // 2
    assert _held_bytes(functional.relu_max_pool2d(x, 4, 4).grad_fn) == n // 16
    assert _held_bytes(functional.max_pool2d(x, 5, 1).grad_fn) == 4 * 3 * 12 * 12
    assert _held_bytes(functional.dropout(x).grad_fn) == n // 8
    # the dense output lives no longer than its last forward reader
    memory = weakref.ref(y.untyped_storage())
    dense = weakref.ref(y)
    del y
    gc.collect()
    assert dense() is None and memory() is None
    z.backward(torch.ones_like(z))
    assert same_bits(x.grad, torch.autograd.grad(F.max_pool2d(F.relu(x), 2).sum(), x)[0])


@pytest.mark.parametrize("f", [functional.relu, functional.dropout, lambda x: functional.max_pool2d(x, 2)])
def test_nothing_recorded_without_gradients(f):
    x = planted((1, 2, 4, 4))
    assert f(x).grad_fn is None
    with torch.no_grad():
        assert f(x.clone().requires_grad_()).grad_fn is None
    with torch.inference_mode():
        assert f(x).is_inference()
