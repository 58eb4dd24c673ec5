"""Every operator does to its arguments what its schema says, and gives fake tensors the real shapes."""

from collections.abc import Iterator

import pytest
import torch

from gistkit.codecs import CODECS
from gistkit.formats import FLOAT_FORMATS, INT_FORMS, SCALINGS
from gistkit.kernels import STRIDES, ops
from gistkit.kernels.sparse.spill import GROUP

BOTH = ("test_schema", "test_faketensor")
ALL = (*BOTH, "test_autograd_registration", "test_aot_dispatch_dynamic")


def of_masks_and_narrow_codes(x: torch.Tensor) -> Iterator[tuple]:
    mask = ops.mask1_encode(x)
    yield from ((name, (x,)) for name in ("mask1_encode", "relu_mask1", "relu_mask1_"))
    yield from ((name, (x, mask)) for name in ("mask1_backward", "mask1_backward_"))
    yield from (("bits_encode", (x > 0,)), ("bits_decode", (mask, 1019)), ("dropout_backward", (x, mask, 2.0)))
    for form in ((fmt, scaling) for fmt in FLOAT_FORMATS for scaling in SCALINGS):
        yield "narrow_encode", (x, *form)
        yield "narrow_decode", (*ops.narrow_encode(x, *form), x.numel(), torch.bfloat16, *form)
    yield "fp10_pack", (x.to(torch.int16),)
    for bits in INT_FORMS.values():
        yield "int_encode", (x, bits, 5)
        yield "int_decode", (*ops.int_encode(x, bits, 5), x.numel(), torch.bfloat16, bits)


def of_pools() -> Iterator[tuple]:
    for bits, dtype in ((4, torch.bfloat16), (8, torch.float32)):
        x = torch.randn(2, 5, 7, 9).to(dtype).contiguous(memory_format=torch.channels_last)
        args = ((3, 3), (2, 2), (1, 1), True, True, True, bits)
        y, codes = ops.maxpool_forward(x, *args)
        yield "maxpool_forward", (x, *args), ALL
        yield "maxpool_backward", (torch.randn_like(y), codes, 7, 9, *args[:3], True, True, bits), ALL


def of_rebuilds(x: torch.Tensor) -> Iterator[tuple]:
    norm, out = [*torch.rand(4, 8)], torch.empty_like(x)
    yield "bn_rebuild", (x, norm, "split", 4, x.flip(0), [], "", True, out)
    yield "bn_rebuild", (x, norm, "fused", 1, x.flip(0), norm, "scaled", False, out)


def of_sparse_storage(x: torch.Tensor) -> Iterator[tuple]:
    """All elements are stored: no place of a scratch stays undefined, and opcheck compares two runs."""
    for layout, fmt in (("zvc", "raw"), ("csr", "fp8")):
        yield f"{layout}_encode", (x, fmt)
        payload = (*getattr(ops, f"{layout}_encode")(x, "raw"), torch.empty(0, dtype=torch.uint8))
        yield f"{layout}_decode", (*payload, x.numel(), x.dtype, "raw", "none", False)
        yield f"{layout}_relu_backward", (x, *payload, x.clone(), "raw", "none", False)
    counts = torch.tensor([1024, 3], dtype=torch.int16)
    yield "compact", (x.new_zeros(2048), counts, 1024, 1027)
    yield "csr_compact", (x[:512].byte(), x[:512], counts // 4, 256)
    lane, words = x.new_zeros(8192, dtype=torch.uint8), torch.full((32,), -1, dtype=torch.int32)
    cells = torch.full((1,), 512), torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    yield "ship", (x, words, counts[:1], 1024, lane, *cells)
    yield "unship", (lane, torch.tensor([512, 1000]), x.new_zeros(512, dtype=torch.uint8), x, None)


def of_spills() -> Iterator[tuple]:
    x = torch.arange(1.0, 2 * GROUP + 1)
    for layout, stride in STRIDES.items():
        codec, capacity = CODECS[layout], GROUP + 8
        spill = torch.zeros(codec.spill_bytes(x.numel(), x.dtype, capacity), dtype=torch.uint8)
        payload = codec.begin_within(x, capacity, spill, torch.zeros((), dtype=torch.int64)).payload
        index, counts, scratch = getattr(ops, f"{layout}_encode")(x, "raw")
        # past the items the arrays are undefined
        if layout == "zvc":
            yield "compact", (scratch, counts, stride, capacity, spill), BOTH[:1]
        else:
            yield "csr_compact", (index, scratch, counts, capacity, spill), BOTH[:1]
        form = ("raw", "none", True, spill)
        yield f"{layout}_decode", (*payload, x.numel(), x.dtype, *form)
        yield f"{layout}_relu_backward", (x, *payload, x.clone(), *form)


X = torch.arange(1.0, 1025.0)
CASES = [*of_masks_and_narrow_codes(X), *of_pools(), *of_rebuilds(X), *of_sparse_storage(X), *of_spills()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_schemas_and_fake_shapes(case):
    name, args, *tests = case
    torch.library.opcheck(getattr(ops, name), args, test_utils=tests[0] if tests else BOTH)


def test_every_operator_has_a_case():
    """But for what is for the CPU alone."""
    defined = {name for name, op in vars(ops).items() if isinstance(op, torch._ops.OpOverload)}
    assert defined - {case[0] for case in CASES} == {"zvc_pack", "csr_pack"}
