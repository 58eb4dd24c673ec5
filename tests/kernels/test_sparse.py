"""The CPU's zvc and csr against their definitions, element by element; the operators' shapes and refusals."""

import pytest
import torch
from hypothesis import given, settings

from gistkit import formats
from gistkit.codecs import CODECS, Sparse
from gistkit.kernels import STRIDES, ops
from gistkit.kernels.reference import narrow, sparse
from gistkit.runtime.live import LiveBytes
from tests.support.sparse_cases import PAYLOADS, UNSCALED, SparseCase, decoded, relu_gradient, sparse_cases
from tests.support.tensors import bits, float_values, plain_nan, same_bits

BOTH = pytest.mark.parametrize("codec", STRIDES)


def stored_positions(x: torch.Tensor) -> list[int]:
    return [i for i, pattern in enumerate(bits(x).tolist()) if pattern != 0]


def signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


@BOTH
@given(case=sparse_cases(formats=UNSCALED))
def test_encoding_follows_its_definition(codec, case):
    """Also packed at once, as a CPU does it."""
    stride, where = STRIDES[codec], stored_positions(case.x)
    slots, total = formats.ceil_div(case.x.numel(), stride), len(where)
    expected_words, expected_counts = [0] * (formats.ZVC_WORDS * slots), [0] * slots
    for i in where:
        if codec == "zvc":
            expected_words[i // 32] |= 1 << i % 32
        expected_counts[i // stride] += 1
    kept = case.x[where]
    expected = kept if case.fmt == "raw" else narrow.to_codes(kept, case.fmt)
    index, counts, values = getattr(ops, f"{codec}_encode")(case.x, case.fmt)
    assert values.shape == (stride * slots,)
    close = index if codec == "zvc" else ops.compact(index, counts, stride, total)
    packed = getattr(sparse, f"{codec}_pack")(case.x, case.fmt)
    for made in ((close, counts, ops.compact(values, counts, stride, total)), packed):
        columns = [i % stride for i in where]
        assert made[0].tolist() == ([signed(w) for w in expected_words] if codec == "zvc" else columns)
        assert made[1].tolist() == expected_counts
        assert same_bits(made[2], expected)
    assert packed[2].untyped_storage().nbytes() == packed[2].nbytes


@BOTH
@given(case=sparse_cases())
def test_decoding_gives_stored_elements_in_their_format_and_positive_zeros(codec, case):
    """A raw one every bit of x; of longer packed arrays, which a codec has that does not know the total, the same."""
    where = stored_positions(case.x)
    kept = case.x[where]
    if case.fmt != "raw":
        codes = ops.narrow_encode(kept, case.fmt, case.scaling)
        kept = ops.narrow_decode(*codes, len(where), case.x.dtype, case.fmt, case.scaling)
    expected = torch.zeros_like(case.x)
    bits(expected)[where] = bits(kept)
    assert case.fmt != "raw" or same_bits(expected, case.x)
    for payload in PAYLOADS[codec](ops, case):
        assert same_bits(decoded(ops, case, payload, codec), expected)
        *arrays, values, exponents, fmt, scaling, packed = payload
        if packed and fmt != "fp10":
            longer = torch.cat((values, values.new_full((300,), 1)))
            missing = formats.scale_count(longer.numel(), scaling) - exponents.numel()
            extra = torch.cat((exponents, exponents.new_full((missing,), 127)))
            assert same_bits(decoded(ops, case, (*arrays, longer, extra, fmt, scaling, packed), codec), expected)


@BOTH
@given(case=sparse_cases().map(SparseCase.relu))
def test_relu_backward_is_pytorchs_whatever_the_format(codec, case):
    expected = torch.ops.aten.threshold_backward(case.grad, case.x, 0)
    for payload in PAYLOADS[codec](ops, case):
        gradient = relu_gradient(ops, case, payload, codec)
        assert same_bits(gradient, torch.where(case.x <= 0, 0, case.grad))
        assert same_bits(plain_nan(gradient), plain_nan(expected))


@pytest.mark.parametrize(
    "codec, fmt, scaling", [("zvc", "fp8", "none"), ("csr", "fp10", "none"), ("zvc", "fp16", "block")]
)
def test_relu_backward_passes_where_a_small_value_became_zero(codec, fmt, scaling):
    x = torch.tensor([1e-30, -0.0, 0.0, 2.0])
    case = SparseCase(x, torch.tensor([1.0, 2.0, 3.0, 4.0]), fmt, scaling)
    for payload in PAYLOADS[codec](ops, case):
        assert decoded(ops, case, payload, codec)[0] == 0
        assert relu_gradient(ops, case, payload, codec).tolist() == [1.0, 0.0, 0.0, 4.0]


@BOTH
@given(case=sparse_cases())
@settings(max_examples=10)
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


@pytest.mark.parametrize("name", ("zvc+fp8", "csr+fp16"))
def test_settling_takes_nothing_but_the_result(name):
    codec = CODECS[name]
    assert isinstance(codec, Sparse)
    encoded = codec.begin(torch.relu(float_values(5000, torch.float32, 1, 0.3, False)))
    before, total = encoded.payload, int(codec.total(encoded))
    with LiveBytes() as live:
        codec.settle(encoded, total)
    made = [a for a in encoded.payload if not any(a is b for b in before)]
    assert codec.packing_bytes(total, torch.float32) == 0
    assert live.peak_bytes == live.current_bytes == sum(a.nbytes for a in made) > 0
