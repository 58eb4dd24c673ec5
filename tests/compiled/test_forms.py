"""Forms as operators of a graph: bits round trip, narrow floats have the codes of the kernels' oracle."""

from types import SimpleNamespace

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from gistkit.compiled import compat
from gistkit.compiled.edit import Builder, strides
from gistkit.compiled.forms.bits import packed
from gistkit.compiled.forms.narrow import Narrow, narrow
from gistkit.formats import VALUE_FORMS
from gistkit.kernels import ops
from tests.support import compiled_cases
from tests.support.tensors import same_bits

G = torch.Generator().manual_seed(7)


def assert_inductor_has_rules(graph):
    """Decompositions are over when forms are added, so every operator needs a lowering of its own."""
    lowerings = compiled_cases.torch._inductor.lowering.lowerings
    targets = {node.target for node in graph.nodes if node.op == "call_function"} - {torch.ops.aten.sym_size.int}
    assert [str(target) for target in targets if target not in lowerings] == []


def graph_of(form, x):
    """The module of a graph that encodes a tensor and decodes it."""
    graph = fx.Graph()
    place = graph.placeholder("x")
    with FakeTensorMode() as mode:
        place.meta["val"] = mode.from_tensor(x)
    output = graph.output(None)
    build = Builder(graph, output)
    payload = list(form.encode(build, place))
    decoded = form.decode(build, payload)
    output.args = ((payload, decoded),)
    assert_inductor_has_rules(graph)
    return fx.GraphModule(torch.nn.Module(), graph)


def through(form, x):
    """(payload, decoded) of a tensor, by a graph that is run as it is."""
    module = graph_of(form, x)
    payload, back = module(x)
    (_, decoded) = module.graph.output_node().args[0]
    assert decoded.meta["val"].stride() == back.stride()
    return payload, back


@pytest.mark.parametrize("shape", [(3, 16, 5, 5), (8,), (5, 24), (2, 3, 8, 7)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_bits_come_back(shape, channels_last):
    mask = torch.rand(shape, generator=G) > 0.5
    if channels_last and len(shape) == 4:
        mask = mask.contiguous(memory_format=torch.channels_last)
    (payload,), back = through(packed(mask), mask)
    assert payload.numel() * 8 == mask.numel() and payload.dtype == torch.uint8
    assert back.dtype == torch.bool and torch.equal(back, mask)


def test_maps_come_back():
    places = torch.randint(16, (2, 7, 6, 5), generator=G, dtype=torch.int8)
    (payload,), back = through(packed(places), places)
    assert payload.numel() * 2 == places.numel() and back.dtype == torch.int8 and torch.equal(back, places)


def test_bits_lie_along_the_innermost_dimension_that_fits():
    assert packed(torch.empty(16, 8, 8)).dim == 2
    assert packed(torch.empty(16, 8, 7)).dim == 1
    assert packed(torch.empty(8, 16, 8, 8).contiguous(memory_format=torch.channels_last)).dim == 1
    assert packed(torch.empty(3, 5)) is None and packed(torch.empty(3, 5, dtype=torch.bool)) is None


def hard_values(dtype):
    """Ties, subnormals, both infinities, NaN, zeros of both signs and what lies between."""
    ends = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 448.0, 464.0, 2**-6, 2**-9, 2**-10, 65504.0, 65520.0]
    grid = torch.arange(0x3C00, 0x3D00).to(torch.int16).view(torch.float16).float()
    values = torch.cat([torch.tensor(ends), grid, -grid * 2**-8, grid * 2**-20, torch.randn(1100, generator=G) * 300])
    return values[:1536].to(dtype).view(2, 8, 12, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", VALUE_FORMS)
def test_narrow_floats_are_those_of_the_oracle(name, dtype):
    x = hard_values(dtype)
    form = narrow(name, x)
    if name.startswith("fp16") and dtype is torch.bfloat16:
        assert "as many bits" in form
        return
    fmt, scaling = VALUE_FORMS[name]
    codes, exponents = ops.narrow_encode(x.flatten(), fmt.name, scaling)
    payload, back = through(form, x)
    if fmt.name == "fp10":
        assert payload[0].shape == codes.shape
    assert torch.equal(payload[0].flatten(), codes)
    if scaling == "block":
        assert torch.equal(payload[1].flatten(), exponents)
    expected = ops.narrow_decode(codes, exponents, x.numel(), dtype, fmt.name, scaling).view_as(x)
    nan = expected.isnan()
    assert torch.equal(nan, back.isnan()) and same_bits(back[~nan], expected[~nan])


@pytest.mark.parametrize("name", ["fp8", "fp8s"])
def test_the_hardware_gives_the_same_codes(name):
    x = hard_values(torch.float32)
    form = narrow(name, x)
    own = Narrow(form.name, form.fmt, form.scaled, form.order, form.shape, form.dtype, hardware=True)
    (codes, *_), back = through(form, x)
    (other, *_), other_back = through(own, x)
    nan = x.isnan()
    assert torch.equal(codes.flatten()[~nan.flatten()], other.view(torch.uint8).flatten()[~nan.flatten()])
    assert same_bits(back[~nan], other_back[~nan]) and other_back[nan].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["fp8", "fp8s", "fp10s"])
def test_a_gpus_kernels_give_the_same_codes(name, dtype):
    """Infinities and values near the largest of the dtype included: conversions saturate, one instruction bounds."""
    large = torch.finfo(dtype).max * hard_values(dtype).sign() * torch.rand(2, 8, 12, 8, generator=G)
    x = torch.cat([hard_values(dtype), large]).to(dtype)
    (codes, *scales), back = through(narrow(name, x), x)
    on_gpu = x.cuda()
    graph = graph_of(narrow(name, on_gpu), on_gpu)
    (other, *other_scales), other_back = torch.compile(graph, fullgraph=True)(on_gpu)
    nan = x.isnan()
    codes, other = codes.flatten(), other.cpu().view(codes.dtype).flatten()
    assert torch.equal(codes, other) if name == "fp10s" else torch.equal(codes[~nan.flatten()], other[~nan.flatten()])
    assert all(torch.equal(a, b.cpu()) for a, b in zip(scales, other_scales, strict=True))
    assert same_bits(back[~nan], other_back.cpu()[~nan]) and other_back.cpu()[nan].isnan().all()


def test_blocks_lie_in_the_order_of_the_memory():
    x = torch.randn(2, 5, 7, 9, generator=G).contiguous(memory_format=torch.channels_last)
    fmt, scaling = VALUE_FORMS["fp8s"]
    flat = x.permute(0, 2, 3, 1).reshape(-1)
    codes, exponents = ops.narrow_encode(flat, fmt.name, scaling)
    payload, back = through(narrow("fp8s", x), x)
    assert torch.equal(payload[0].flatten()[: flat.numel()], codes) and torch.equal(payload[1].flatten(), exponents)
    expected = ops.narrow_decode(codes, exponents, flat.numel(), x.dtype, fmt.name, scaling)
    assert torch.equal(back.permute(0, 2, 3, 1).reshape(-1), expected) and back.stride() == x.stride()


def test_what_is_decoded_lies_as_forward_left_it(monkeypatch):
    monkeypatch.setattr(compat, "prefers_channels_last", lambda graph: True)
    pair = SimpleNamespace(forward=None)
    image, heads = torch.empty(2, 3, 7, 8), torch.empty(2, 7, 3, 8).transpose(1, 2)
    assert strides(pair, image) == [168, 1, 24, 3]  # Inductor lays it out so
    assert strides(pair, heads) == list(heads.stride())  # an attention's own result
