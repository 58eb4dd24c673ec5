"""The CPU's zvc and csr against their definitions, element by element; the operators' shapes and refusals."""

import pytest
import torch
from hypothesis import given, settings

from gistkit import formats
from gistkit.kernels import ops
from gistkit.kernels.reference import narrow, sparse
from tests.support.sparse_cases import (
    EMPTY,
    PAYLOADS,
    SCALED,
    UNSCALED,
    SparseCase,
    decoded,
    relu_gradient,
    sparse_cases,
)
from tests.support.tensors import FLOATS, bits, float_values, plain_nan, same_bits

SLOT, COLUMNS = formats.ZVC_SLOT, formats.CSR_COLUMNS
CODECS = ("zvc", "csr")


def stored_positions(x: torch.Tensor) -> list[int]:
    return [i for i, pattern in enumerate(bits(x).tolist()) if pattern != 0]


def signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def test_zvc_of_a_few_elements_by_hand():
    x = torch.zeros(1056)
    x[[0, 33, 63, 1024]] = torch.tensor([1.5, -0.0, torch.nan, torch.inf])
    words, counts, values = ops.zvc_encode(x, "raw")
    expected = torch.zeros(64, dtype=torch.int32)
    expected[[0, 1, 32]] = torch.tensor([1, signed(1 << 31 | 1 << 1), 1], dtype=torch.int32)
    assert torch.equal(words, expected)
    assert counts.tolist() == [3, 1] and counts.dtype == torch.int16
    assert values.shape == (2048,)
    assert same_bits(values[:3], x[[0, 33, 63]]) and same_bits(values[1024:1025], x[1024:1025])


def test_csr_of_a_few_elements_by_hand():
    x = torch.zeros(600, dtype=torch.bfloat16)
    x[[0, 255, 256, 599]] = torch.tensor([2.0, -0.0, 1e-40, 3.0], dtype=torch.bfloat16)
    counts, columns, values = ops.csr_encode(x, "raw")
    assert counts.tolist() == [2, 1, 1] and counts.dtype == torch.int16
    assert columns.dtype == torch.uint8 and columns.shape == values.shape == (768,)
    assert columns[[0, 1, 256, 512]].tolist() == [0, 255, 0, 599 - 512]
    assert same_bits(values[[0, 1, 256, 512]], x[[0, 255, 256, 599]])


@given(sparse_cases(formats=UNSCALED))
def test_zvc_follows_its_definition(case):
    words, counts, values = ops.zvc_encode(case.x, case.fmt)
    where = stored_positions(case.x)
    slots = formats.ceil_div(case.x.numel(), SLOT)
    expected_words, expected_counts = [0] * (32 * slots), [0] * slots
    for i in where:
        expected_words[i // 32] |= 1 << i % 32
        expected_counts[i // SLOT] += 1
    assert words.tolist() == [signed(w) for w in expected_words]
    assert counts.tolist() == expected_counts
    kept = case.x[where]
    expected = kept if case.fmt == "raw" else narrow.to_codes(kept, case.fmt)
    assert values.shape == (SLOT * slots,)
    assert same_bits(ops.compact(values, counts, SLOT, len(where)), expected)


@given(sparse_cases(formats=UNSCALED))
def test_csr_follows_its_definition(case):
    counts, columns, values = ops.csr_encode(case.x, case.fmt)
    where = stored_positions(case.x)
    rows = formats.ceil_div(case.x.numel(), COLUMNS)
    expected_counts = [0] * rows
    for i in where:
        expected_counts[i // COLUMNS] += 1
    assert counts.tolist() == expected_counts
    assert ops.compact(columns, counts, COLUMNS, len(where)).tolist() == [i % COLUMNS for i in where]
    kept = case.x[where]
    expected = kept if case.fmt == "raw" else narrow.to_codes(kept, case.fmt)
    assert same_bits(ops.compact(values, counts, COLUMNS, len(where)), expected)


@pytest.mark.parametrize("codec", CODECS)
@given(case=sparse_cases())
def test_decoding_gives_stored_elements_in_their_format_and_positive_zeros(codec, case):
    for payload in PAYLOADS[codec](ops, case):
        where = stored_positions(case.x)
        kept = case.x[where]
        if case.fmt != "raw":
            codes, exponents = getattr(ops, f"{case.fmt}_encode")(kept, case.scaling)
            decode = getattr(ops, f"{case.fmt}_decode")
            kept = decode(codes, exponents, len(where), case.x.dtype, case.scaling)
        expected = torch.zeros_like(case.x)
        bits(expected)[where] = bits(kept)
        assert same_bits(decoded(ops, case, payload, codec), expected)


@pytest.mark.parametrize("codec", CODECS)
@given(case=sparse_cases(formats=(("raw", "none"),)))
def test_raw_keeps_every_bit(codec, case):
    for payload in PAYLOADS[codec](ops, case):
        assert same_bits(decoded(ops, case, payload, codec), case.x)


@pytest.mark.parametrize("codec", CODECS)
@given(case=sparse_cases().map(SparseCase.relu))
def test_relu_backward_is_pytorchs_whatever_the_format(codec, case):
    expected = torch.ops.aten.threshold_backward(case.grad, case.x, 0)
    for payload in PAYLOADS[codec](ops, case):
        gradient = relu_gradient(ops, case, payload, codec)
        assert same_bits(gradient, torch.where(case.x <= 0, 0, case.grad))
        assert same_bits(plain_nan(gradient), plain_nan(expected))


@pytest.mark.parametrize("fmt, scaling", UNSCALED[1:] + SCALED)
@pytest.mark.parametrize("codec", CODECS)
def test_relu_backward_passes_where_a_small_value_became_zero(codec, fmt, scaling):
    x = torch.tensor([1e-30, -0.0, 0.0, 2.0])
    case = SparseCase(x, torch.tensor([1.0, 2.0, 3.0, 4.0]), fmt, scaling)
    for payload in PAYLOADS[codec](ops, case):
        assert decoded(ops, case, payload, codec)[0] == 0
        assert relu_gradient(ops, case, payload, codec).tolist() == [1.0, 0.0, 0.0, 4.0]


@pytest.mark.parametrize("codec", CODECS)
def test_the_gradients_dtype_need_not_be_the_values(codec):
    case = SparseCase(torch.tensor([1.0, 0.0, -0.0, 3.0]), torch.ones(4, dtype=torch.bfloat16), "raw", "none")
    for payload in PAYLOADS[codec](ops, case):
        assert same_bits(relu_gradient(ops, case, payload, codec), torch.tensor([1, 0, 0, 1], dtype=torch.bfloat16))


@pytest.mark.parametrize("codec", CODECS)
@given(case=sparse_cases(longest=2000))
@settings(max_examples=25)
def test_longer_packed_arrays_decode_the_same(codec, case):
    """A codec that does not know the total yet packs at full capacity; what lies past the values is ignored."""
    for payload in PAYLOADS[codec](ops, case):
        *arrays, values, exponents, fmt, scaling, packed = payload
        if packed and fmt != "fp10":
            longer = torch.cat((values, values.new_full((300,), 1)))
            missing = formats.scale_count(longer.numel(), scaling) - exponents.numel()
            extra = torch.cat((exponents, exponents.new_full((missing,), 127)))
            again = (*arrays, longer, extra, fmt, scaling, packed)
            assert same_bits(decoded(ops, case, again, codec), decoded(ops, case, payload, codec))


@pytest.mark.parametrize("codec", CODECS)
@given(case=sparse_cases())
@settings(max_examples=25)
def test_blocks_meet_without_a_seam(codec, case):
    """Blocks of 2048 elements in place of 2**18, so that small inputs span several."""
    whole = PAYLOADS[codec](sparse, case)
    patch = pytest.MonkeyPatch()
    with patch.context() as m:
        m.setattr(sparse, "BLOCK", 2048)
        for payload, expected in zip(PAYLOADS[codec](sparse, case), whole, strict=True):
            if payload[-1]:
                arrays = zip(payload[:4], expected[:4], strict=True)
                assert all(same_bits(a, b) for a, b in arrays)
            assert same_bits(decoded(sparse, case, payload, codec), decoded(sparse, case, expected, codec))
            gradients = (relu_gradient(sparse, case, p, codec) for p in (payload, expected))
            assert same_bits(*gradients)


@pytest.mark.parametrize("dtype", FLOATS)
def test_many_blocks_at_their_real_size(dtype):
    x = float_values(2 * sparse.BLOCK + 1025, dtype, 0, 0.5, False)
    case = SparseCase(x, x, "raw", "none")
    for codec in CODECS:
        for payload in PAYLOADS[codec](ops, case):
            assert same_bits(decoded(ops, case, payload, codec), x)


@given(sparse_cases(formats=UNSCALED))
@settings(max_examples=25)
def test_packing_at_once_equals_encode_and_compact(case):
    words, counts, values = sparse.zvc_pack(case.x, case.fmt)
    expected = ops.zvc_encode(case.x, case.fmt)
    assert torch.equal(words, expected[0]) and torch.equal(counts, expected[1])
    assert same_bits(values, ops.compact(expected[2], counts, SLOT, int(counts.sum())))
    assert values.untyped_storage().nbytes() == values.numel() * values.element_size()
    counts, columns, values = sparse.csr_pack(case.x, case.fmt)
    expected = ops.csr_encode(case.x, case.fmt)
    assert torch.equal(counts, expected[0])
    assert torch.equal(columns, ops.compact(expected[1], counts, COLUMNS, int(counts.sum())))
    assert same_bits(values, ops.compact(expected[2], counts, COLUMNS, int(counts.sum())))


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int16, torch.bfloat16, torch.int32, torch.float32))
@pytest.mark.parametrize("stride", (SLOT, COLUMNS))
def test_compact_moves_items_of_any_size(dtype, stride):
    scratch = torch.arange(3 * stride).to(dtype)
    counts = torch.tensor([2, 0, stride], dtype=torch.int16)
    packed = ops.compact(scratch, counts, stride, 2 + stride)
    assert torch.equal(packed, torch.cat((scratch[:2], scratch[2 * stride :])))


OPERATOR_CASES = [
    ("zvc_encode", lambda x: (x, "raw")),
    ("csr_encode", lambda x: (x, "fp8")),
    ("compact", lambda x: (x.new_zeros(2048), torch.tensor([1024, 3], dtype=torch.int16), SLOT, 1027)),
    ("csr_compact", lambda x: (x[:512].byte(), x[:512], torch.tensor([256, 9], dtype=torch.int16), 265)),
    ("compact_blocks", lambda x: (x.new_ones(2048), torch.tensor([1024, 3], dtype=torch.int16), SLOT, 1027, "fp8")),
    (
        "csr_compact_blocks",
        lambda x: (x[:512].byte(), x[:512], torch.tensor([256, 9], dtype=torch.int16), 265, "fp16"),
    ),
    ("zvc_decode", lambda x: (*ops.zvc_encode(x, "raw"), EMPTY, x.numel(), x.dtype, "raw", "none", False)),
    ("csr_decode", lambda x: (*ops.csr_encode(x, "raw"), EMPTY, x.numel(), x.dtype, "raw", "none", False)),
    ("zvc_relu_backward", lambda x: (x, *ops.zvc_encode(x, "raw"), EMPTY, "raw", "none", False)),
    ("csr_relu_backward", lambda x: (x, *ops.csr_encode(x, "raw"), EMPTY, "raw", "none", False)),
    ("zvc_relu_backward_", lambda x: (x, *ops.zvc_encode(x, "raw"), EMPTY, "raw", "none", False)),
    ("csr_relu_backward_", lambda x: (x, *ops.csr_encode(x, "raw"), EMPTY, "raw", "none", False)),
]


@pytest.mark.parametrize("name, arguments", OPERATOR_CASES, ids=[name for name, _ in OPERATOR_CASES])
def test_fake_tensors_get_the_real_shapes(name, arguments):
    # all elements stored: no place of a scratch stays undefined, and opcheck compares two runs
    args = arguments(torch.arange(1.0, 1281.0)[:1024])
    torch.library.opcheck(getattr(ops, name), args, test_utils=("test_schema", "test_faketensor"))


X = torch.arange(4.0)
WORDS, COUNTS, VALUES = sparse.zvc_encode(X, "raw")
REFUSALS = [
    (TypeError, r"zvc_encode: x must be of dtype .* got torch.int64; convert", lambda: ops.zvc_encode(X.long(), "raw")),
    (
        ValueError,
        r"zvc_encode: x must be 1-D and contiguous, got shape \(2, 2\)",
        lambda: ops.zvc_encode(X.view(2, 2), "raw"),
    ),
    (ValueError, r"csr_encode: fmt must be one of raw, fp16, fp10, fp8, got 'fp7'", lambda: ops.csr_encode(X, "fp7")),
    (ValueError, r"compact: stride must be 1024 \(zvc\) or 256 \(csr\), got 7", lambda: ops.compact(X, COUNTS, 7, 3)),
    (ValueError, r"compact: scratch must have 1024 elements", lambda: ops.compact(X, COUNTS, SLOT, 3)),
    (
        ValueError,
        r"compact: total must be between 0 and 1024, got 1025",
        lambda: ops.compact(VALUES, COUNTS, SLOT, 1025),
    ),
    (ValueError, r"compact: total must be at least .*, 3, got 2", lambda: ops.compact(VALUES, COUNTS, SLOT, 2)),
    (
        ValueError,
        r"compact: scratch must have 256 elements to match 1 slots of 256",
        lambda: ops.csr_compact(X.byte(), VALUES[:256], COUNTS, 3),
    ),
    (
        TypeError,
        r"compact: scratch must have items of 1, 2 or 4 bytes",
        lambda: ops.compact(VALUES.double(), COUNTS, SLOT, 3),
    ),
    (
        ValueError,
        r"compact_blocks: fmt must be one of fp16, fp8, got 'fp10'; choose one of these",
        lambda: ops.compact_blocks(VALUES, COUNTS, SLOT, 3, "fp10"),
    ),
    (
        TypeError,
        r"csr_compact_blocks: scratch must be of dtype .* got torch.int32; convert",
        lambda: ops.csr_compact_blocks(VALUES[:256].byte(), VALUES[:256].int(), COUNTS, 3, "fp8"),
    ),
    (
        ValueError,
        r"zvc_decode: words must have 64 elements to match 1025 elements, got 32",
        lambda: ops.zvc_decode(WORDS, COUNTS, VALUES, EMPTY, 1025, X.dtype, "raw", "none", False),
    ),
    (
        TypeError,
        r"zvc_decode: values must be of dtype torch.uint8, got torch.float32",
        lambda: ops.zvc_decode(WORDS, COUNTS, VALUES, EMPTY, 4, X.dtype, "fp8", "none", False),
    ),
    (
        ValueError,
        r"zvc_decode: scaling must be none for fmt='raw' and for packed=False, got 'block'",
        lambda: ops.zvc_decode(WORDS, COUNTS, VALUES, EMPTY, 4, X.dtype, "raw", "block", True),
    ),
    (
        ValueError,
        r"zvc_decode: exponents must have 8 elements to match 1024 fp8 codes scaled per block, got 1; pass the ones",
        lambda: ops.zvc_decode(WORDS, COUNTS, VALUES.byte(), EMPTY.new_zeros(1), 4, X.dtype, "fp8", "block", True),
    ),
    (
        ValueError,
        r"zvc_relu_backward: scaling must be one of none, tensor, block, got 'row'",
        lambda: ops.zvc_relu_backward(X, WORDS, COUNTS, VALUES, EMPTY, "raw", "row", False),
    ),
    (
        ValueError,
        r"values must hold the 3 elements that counts name, got 2",
        lambda: ops.zvc_decode(WORDS, COUNTS, VALUES[:2], EMPTY, 4, X.dtype, "raw", "none", True),
    ),
]


@pytest.mark.parametrize("kind, text, call", REFUSALS, ids=range(len(REFUSALS)))
def test_refusals_name_argument_demand_value_and_remedy(kind, text, call):
    with pytest.raises(kind, match=text):
        call()
