"""Laws over all CODECS, and what each refuses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.codecs import CODECS, VALUE_FORMS, Codec, Encoded, Sparse, codec, dtype_of
from gistkit.errors import GistError
from gistkit.formats import INT_FORMS
from gistkit.ir.forms import FORMS
from gistkit.kernels.layout import is_dense
from tests.support.bounds import error_bound
from tests.support.tensors import FLOATS, laid_out, plain_nan, same_bits, tensors, values_of

FLOAT_CODECS = [name for name, c in CODECS.items() if c.accepts(torch.zeros(1)) is None]
LOSSLESS = [name for name, c in CODECS.items() if c.lossless]
BOUNDED = [name for name, c in CODECS.items() if c.relative_error is not None]
RELU = [name for name in FLOAT_CODECS if CODECS[name].form.signs]
FIXED = {"bits": torch.bool, "argmax4": torch.uint8, "argmax8": torch.uint8}
law = settings(deadline=None, max_examples=25, derandomize=True)


def any_tensor(name: str) -> st.SearchStrategy[torch.Tensor]:
    return tensors(FIXED.get(name))


def nonzeros(x: torch.Tensor) -> int:
    integer = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()]
    return int((x.contiguous().view(integer) != 0).sum())


def alone(x: torch.Tensor) -> torch.Tensor:
    """x where it fills its storage, else a copy that does."""
    return x if x.untyped_storage().nbytes() == x.numel() * x.element_size() and is_dense(x) else x.clone()


def test_every_codec_is_in_exactly_one_law():
    assert set(LOSSLESS) | set(BOUNDED) | {"mask1"} == set(CODECS)
    assert not set(LOSSLESS) & set(BOUNDED)
    assert len(VALUE_FORMS) == 6 and len(INT_FORMS) == 2 and len(CODECS) == 5 + 2 + 3 * 6 + 2
    assert all(c.name == name and codec(name) is c for name, c in CODECS.items())


def test_codecs_do_what_the_table_of_forms_says():
    assert {name for name, form in FORMS.items() if form.payload} == set(CODECS)
    for name, c in CODECS.items():
        form = FORMS[name]
        assert form.sparse == isinstance(c, Sparse) and bool(form.rounds_to) == (c.relative_error is not None)
        assert form.lossless == c.lossless
        assert [d for d in ("float32", "bool", "uint8", "int64") if form.dtypes is None or d in form.dtypes] == [
            d for d in ("float32", "bool", "uint8", "int64") if c.accepts(torch.zeros(1, dtype=dtype_of(d))) is None
        ]
        assert form.signs == (form.dtypes is None or ("float32" in form.dtypes and _masks(c)))


def _masks(c: Codec) -> bool:
    y = torch.tensor([0.0, 1e-9, 1.0, float("nan")])
    try:
        got = c.relu_backward(c.encode(y), torch.ones(4))
    except GistError:
        return False
    return torch.equal(got, torch.tensor([0.0, 1.0, 1.0, 1.0]))


@pytest.mark.parametrize("name", LOSSLESS)
@law
@given(data=st.data())
def test_lossless_codecs_give_every_bit_back(name, data):
    x = data.draw(any_tensor(name))
    decoded = CODECS[name].decode(CODECS[name].encode(x))
    assert same_bits(decoded, x)
    assert not is_dense(x) or decoded.stride() == x.stride()


@pytest.mark.parametrize("name", BOUNDED)
@law
@given(x=tensors())
def test_lossy_codecs_keep_to_their_bound(name, x):
    c = CODECS[name]
    decoded = c.decode(c.encode(x))
    assert decoded.dtype == x.dtype and decoded.shape == x.shape
    assert not is_dense(x) or decoded.stride() == x.stride()
    x = x if is_dense(x) else x.contiguous()
    bound = error_bound(c, x)
    # differences of the two are exact in float64: at most 24 significant bits each, exponents at most one step apart
    error, finite = (decoded.double() - x.double()).abs(), x.isfinite()
    if name in INT_FORMS:
        assert torch.equal(decoded.isnan(), bound.isnan()) and bound[~finite].isnan().all()
        assert (error <= bound)[~bound.isnan()].all()
        return
    assert torch.equal(decoded.isnan(), x.isnan())
    assert (error <= bound)[finite].all()
    assert decoded[finite].isfinite().all()
    assert torch.equal(decoded.signbit()[~x.isnan()], x.signbit()[~x.isnan()])


@pytest.mark.parametrize("name", INT_FORMS)
def test_a_seed_reproduces_and_no_generator_moves(name):
    x, c = torch.randn(5000), CODECS[name]
    torch.manual_seed(5)
    state, first = torch.get_rng_state(), c.encode(x)
    assert torch.equal(torch.get_rng_state(), state)
    other_content = c.encode(x + 1e-6)
    torch.rand(3)
    assert all(same_bits(a, b) for a, b in zip(first.payload, c.encode(x).payload, strict=True))
    torch.manual_seed(6)
    for other in (c.encode(x), other_content):  # other numbers: of four codes some are rounded the other way
        assert (other.payload[0] != first.payload[0]).float().mean() > 0.5


@pytest.mark.parametrize("name", INT_FORMS)
def test_integer_bounds_are_nearly_reached(name):
    x = torch.linspace(0, 1, 100_000)
    x[-1], c = 1.0, CODECS[name]
    error = (c.decode(c.encode(x)) - x).abs().double()
    assert 0.9 < (error / error_bound(c, x)).max() <= 1


@pytest.mark.parametrize("name", sorted(VALUE_FORMS))
def test_bounds_are_reached(name):
    fmt, _ = VALUE_FORMS[name]
    c = CODECS[name]
    tie = 1 + 2.0 ** -(fmt.mantissa_bits + 1)
    x = torch.tensor([tie])
    error = (c.decode(c.encode(x)) - x).abs().item()
    assert error == 2.0 ** -(fmt.mantissa_bits + 1) == error_bound(c, x).item() / tie
    small = torch.tensor([1.0, 2.0 ** -(fmt.max_exponent + fmt.bias + fmt.mantissa_bits)])
    assert c.decode(c.encode(small))[1] == 0 and error_bound(c, small)[1] >= small[1]


@law
@given(x=tensors())
def test_mask1_decodes_to_what_passes(x):
    decoded = CODECS["mask1"].decode(CODECS["mask1"].encode(x))
    assert same_bits(decoded, (~(x <= 0)).to(x.dtype))


@pytest.mark.parametrize("name", list(CODECS))
@law
@given(data=st.data())
def test_declared_held_and_predicted_bytes_are_equal(name, data):
    x = alone(data.draw(any_tensor(name)))
    c, n = CODECS[name], x.numel()
    encoded = c.encode(x)
    density = nonzeros(x) / n if n else 0.0
    assert not encoded.pending
    assert encoded.nbytes == sum(t.untyped_storage().nbytes() for t in encoded.payload)
    assert encoded.nbytes == c.predicted_bytes(n, x.dtype, density)
    assert c.predicted_bytes(n, x.dtype) == c.predicted_bytes(n, x.dtype, 1.0) >= encoded.nbytes
    assert encoded.nonzeros == (nonzeros(x) if isinstance(c, Sparse) else None)


@pytest.mark.parametrize("name", RELU)
@law
@given(x=tensors(), layout=st.sampled_from(["contiguous", "permuted", "channels_last", "strided", "expanded"]))
def test_relu_backward_is_threshold_backward(name, x, layout):
    y = torch.relu(x)
    grad = laid_out(values_of(y.numel(), y.dtype, 7, 0.1, False), tuple(y.shape), layout)
    encoded = CODECS[name].encode(y)
    got = CODECS[name].relu_backward(encoded, grad)
    # PyTorch's CPU kernels rewrite NaN payloads in bf16 and fp16, differently in vectors and in their tails
    assert same_bits(plain_nan(got), plain_nan(torch.ops.aten.threshold_backward(grad, y, 0)))
    assert got.stride() == y.stride() or not is_dense(y)


@pytest.mark.parametrize("name", ["fp16", "int4s", "bits", "argmax8"])
def test_codecs_that_lose_small_values_refuse_to_mask(name):
    y = torch.full((4,), 1e-9).to(FIXED.get(name, torch.float32))
    text = f"codec {name} cannot mask a ReLU's gradient: of {y.dtype} .* keep a mask1 of the ReLU's output beside it"
    with pytest.raises(GistError, match=text):
        CODECS[name].relu_backward(CODECS[name].encode(y), torch.ones(4))


@pytest.mark.parametrize("name", ["dense", "mask1", "zvc"])
def test_relu_backward_refuses_another_shape(name):
    encoded = CODECS[name].encode(torch.ones(2, 3))
    with pytest.raises(
        ValueError, match=r"grad must have the encoded tensor's shape \(2, 3\), got \(3, 2\); pass the gradient"
    ):
        CODECS[name].relu_backward(encoded, torch.ones(3, 2))


@pytest.mark.parametrize("name", ["mask1", "bits", "argmax4", "zvc", "int4s", "csr+fp8s"])
def test_refusals_name_dtype_layout_and_device(name):
    c = CODECS[name]
    good = FIXED.get(name, torch.float32)
    for dtype in (torch.float64, torch.int64, torch.complex64):
        assert f"dtype {dtype} is not " in c.accepts(torch.zeros(2, dtype=dtype))
        with pytest.raises(TypeError, match=f"codec {name.replace('+', '.')}: x cannot be encoded: dtype {dtype}"):
            c.encode(torch.zeros(2, dtype=dtype))
    assert c.accepts(torch.zeros(2, dtype=good)) is None
    assert c.accepts(torch.zeros(2, dtype=good, device="meta")) == "device meta has no kernels, only cpu and cuda have"
    sparse = torch.zeros(2, 2, dtype=good).to_sparse()
    assert c.accepts(sparse) == "layout torch.sparse_coo is not torch.strided"


def test_float_codecs_name_the_dtypes_that_they_take():
    assert CODECS["zvc"].accepts(torch.zeros(2, dtype=torch.float64)) == (
        "dtype torch.float64 is not float32, bfloat16 or float16"
    )
    assert all(CODECS[name].accepts(torch.zeros(1, dtype=dtype)) is None for name in FLOAT_CODECS for dtype in FLOATS)


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(
        ValueError, match=r"name must be one of dense, mask1, .*; got 'zcv\+fp8'; did you mean 'zvc\+fp8'\?"
    ):
        codec("zcv+fp8")
    with pytest.raises(ValueError, match=r"got 'qqq'$"):
        codec("qqq")


def test_argmax4_refuses_large_positions():
    with pytest.raises(ValueError, match="positions below 16, got 24; use argmax8"):
        CODECS["argmax4"].encode(torch.tensor([3, 24], dtype=torch.uint8))


def test_argmax4_is_low_nibble_first():
    encoded = CODECS["argmax4"].encode(torch.tensor([1, 2, 3], dtype=torch.uint8))
    assert encoded.payload[0].tolist() == [0x21, 0x03]


def test_dense_keeps_the_tensor_and_notices_a_write():
    x = torch.ones(3, 4, requires_grad=True) * 2
    encoded = CODECS["dense"].encode(x)
    decoded = CODECS["dense"].decode(encoded)
    assert decoded.untyped_storage()._cdata == x.untyped_storage()._cdata and not decoded.requires_grad
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"):
        CODECS["dense"].decode(encoded)


def test_dense_takes_inference_tensors():
    with torch.inference_mode():
        x = torch.ones(3)
        inside = CODECS["dense"].encode(x)
    assert torch.equal(CODECS["dense"].decode(inside), x)
    assert torch.equal(CODECS["dense"].decode(CODECS["dense"].encode(x)), x)


def test_nbytes_counts_a_storage_once_and_in_full():
    big = torch.zeros(1000)
    encoded = Encoded("dense", (big[:10], big[10:20]), big[:10])
    assert encoded.nbytes == 4000
    assert repr(encoded) == "Encoded(dense, (10,), torch.float32, 4000 bytes)"


@pytest.mark.parametrize("name", FLOAT_CODECS)
def test_payloads_leave_the_graph(name):
    x = torch.randn(300, requires_grad=True).relu()
    encoded = CODECS[name].encode(x)
    assert not any(t.requires_grad for t in encoded.payload)
    assert not CODECS[name].decode(encoded).requires_grad


def test_a_lazily_negated_tensor_is_encoded_as_its_values():
    for x in (torch.randn(8, dtype=torch.complex64).conj().imag, torch._neg_view(torch.randn(8))):
        assert x.is_neg()
        assert torch.equal(CODECS["zvc"].decode(CODECS["zvc"].encode(x)), x.resolve_neg())


@pytest.mark.parametrize(
    ("name", "dtype", "dense", "sparsity"),
    [("csr", torch.float32, "dense", 1 / 5), ("csr", torch.bfloat16, "dense", 1 / 3),
     ("csr+fp8", torch.float32, "fp8", 1 / 2)],
)  # fmt: skip
def test_one_byte_column_indices_save_from_a_fifth_of_zeros_on(name, dtype, dense, sparsity):
    """Gist, section IV-A: a value of b bytes takes b + 1, so 1 / (b + 1) of zeros pay for the indices; and a hundredth
    more for the counts, two bytes a row of 256. With indices of four bytes fp32 values pay from a half on."""
    for zeros, saves in ((sparsity - 0.01, False), (sparsity + 0.01, True)):
        x = with_zeros(zeros, dtype)
        assert (CODECS[name].encode(x).nbytes < CODECS[dense].encode(x).nbytes) is saves
    for zeros, saves in ((0.49, False), (0.51, True)):
        x = with_zeros(zeros, torch.float32)
        assert (nonzeros(x) * (4 + 4) < x.nbytes) is saves


def with_zeros(share: float, dtype: torch.dtype) -> torch.Tensor:
    """64 Ki values, so many of which are zeros, evenly spread."""
    steps = (torch.arange(65537, dtype=torch.float64) * share).floor()
    return (steps[1:] == steps[:-1]).to(dtype)
