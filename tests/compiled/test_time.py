"""Rebuilds within a share of the step's modelled time, and products that are computed anew."""

import operator
import re
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gistkit.compiled import Settings, edit, partitioner, record
from gistkit.compiled.forms import narrow
from gistkit.compiled.rebuilds.flow import DEPTHWISE_A_S, OPERATIONS_A_S, library_s, step_s
from gistkit.compiled.rebuilds.rounding import behind_views
from gistkit.planning.flow import CHEAP, FREE, MADE, UNKEPT, Flow, Limits, Value
from gistkit.planning.rebuilds import choose
from tests.compiled.test_partitioner import amp_loss, run
from tests.support.compiled_cases import assert_same, case, loss_of

with warnings.catch_warnings():  # PyTorch's own, of torch.jit
    warnings.simplefilter("ignore")
    from tests.support import gpu_code

from gistkit.compiled.custom import Partitioner

SECOND = 2_600_000_000_000
"""Bytes that the model moves in a second."""


class Bottleneck(nn.Module):
    """A block of ResNet-50: its last convolution makes four times what it reads."""

    def __init__(self, wide, narrow):
        super().__init__()
        sizes = (wide, narrow, 1), (narrow, narrow, 3), (narrow, wide, 1)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, k, padding=k // 2, bias=False) for a, b, k in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _ in sizes)

    def forward(self, x):
        y = x
        for conv, norm in zip(self.convs[:2], self.norms[:2], strict=True):
            y = F.relu(norm(conv(y)))
        return F.relu(self.norms[2](self.convs[2](y)) + x)


class Perceptron(nn.Module):
    """The second half of a transformer's block."""

    def __init__(self, width=32):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def net_of(kind, rows, blocks=1, wide=32):
    torch.manual_seed(3)
    if kind == "bottleneck":
        parts = (
            nn.Conv2d(3, wide, 3, padding=1, bias=False),
            *(Bottleneck(wide, wide // 4) for _ in range(blocks)),
            nn.AdaptiveAvgPool2d(1),
        )
        model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(wide, 10))
        x = torch.randn(rows, 3, 16, 16).to(memory_format=torch.channels_last)
    else:
        model = nn.Sequential(nn.Linear(48, 32), Perceptron(), Perceptron(), nn.Linear(32, 10))
        x = torch.randn(rows, 48)
    return model, x, torch.randint(10, (rows,))


@pytest.mark.parametrize("loss", [loss_of, amp_loss])
@pytest.mark.parametrize(("kind", "rows"), [("bottleneck", 16), ("perceptron", 2048)])
@pytest.mark.parametrize("same_kernels", [False, True])
def test_products_made_anew_have_the_same_bits(request, kind, rows, loss, same_kernels):
    if same_kernels:
        request.getfixturevalue("as_on_a_gpu")
    model, x, y = net_of(kind, rows)
    plain, _ = run(loss, model, [(x, y)], None)
    ours, (graph,) = run(loss, model, [(x, y)], Settings())
    assert_same(plain[0], ours[0])
    ops = "convolution" if kind == "bottleneck" else "addmm"
    assert any(row.form == "rebuild" and row.op == ops for row in graph.rows)
    assert graph.kept_bytes < 0.7 * graph.plain_bytes


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="reads Inductor's code by its private names")
@pytest.mark.parametrize(("kind", "rows"), [("bottleneck", 256), ("perceptron", 2048)])
def test_beside_products_every_kernel_with_a_sum_is_plain_compiles(as_on_a_gpu, monkeypatch, kind, rows):
    gpu_code.pretend_gpu(monkeypatch)
    plain = gpu_code.kernels(lambda: net_of(kind, rows), amp_loss)
    with record.collected() as found:
        ours = gpu_code.kernels(lambda: net_of(kind, rows), amp_loss, Partitioner(Settings()))
    made = "convolution" if kind == "bottleneck" else "addmm"
    assert made in {row.op for row in found[0].rows if row.form == "rebuild"}
    for some, others in zip(plain, ours, strict=True):
        assert set(gpu_code.reductions(some)) == set(gpu_code.reductions(others))


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="reads Inductor's code by its private names")
def test_decoders_are_within_the_kernels_that_read_and_encoders_have_blocks_of_their_own(monkeypatch):
    gpu_code.pretend_gpu(monkeypatch)
    monkeypatch.setattr(narrow, "converts_to_float8", lambda device: True)
    partitioner, seen = Partitioner(Settings(lossy="fp8s")), set()
    forward, backward = gpu_code.kernels(lambda: net_of("bottleneck", 64, 2, 256), amp_loss, partitioner)
    own = [re.match(r"fixed_config\( config={'XBLOCK': (8|16), 'num_warps': (4|8)}", text) for text in forward]
    assert [bool(found) for found in own] == ["float8e4nv" in text for text in forward]
    for text, blocks in zip(forward, own, strict=True):
        whole = len(re.findall(r"tl\.load\(p \+ \(r0_\d+ \+ 128\*x\d+\)", text))
        row = re.search(r"tl\.load\(p \+ \(r0_\d+\)", text)  # read once for all rows
        if blocks:
            assert blocks.groups() == (("16", "8") if row else ("8" if whole > 1 else "16", "4"))
            seen.add(blocks.groups())
    assert len(seen) == 3
    decoding = [text for text in backward if ".to(tl.float32, bitcast=True)" in text]
    assert len(set(decoding) & set(gpu_code.reductions(backward))) >= 2  # the norms' sums read codes
    assert all(text.count("tl.load(") > 2 for text in decoding)  # none of them decodes alone
    assert all(text.count("min.NaN.xorsign.abs.f32") == text.count("bitcast=True") for text in decoding)


def test_what_takes_a_kernel_of_its_own_is_rounded_last(monkeypatch):
    model, x, y = net_of("perceptron", 2048)
    found = {}
    for share in (0.85, 0.0, 10.0):
        monkeypatch.setattr(partitioner, "ROUNDED_SHARE", share)
        _, (graph,) = run(loss_of, model, [(x, y)], Settings(lossy="fp8s"))
        found[share] = graph
    assert found[0.0].kept_bytes < found[10.0].kept_bytes
    assert found[0.0].kept_bytes <= found[0.85].kept_bytes <= found[10.0].kept_bytes
    left = [row for row in found[10.0].rows if row.reason == "rounding it would take a kernel of its own"]
    assert left and all(row.form == "dense" for row in left)
    assert any(row.form == "fp8s" for row in found[10.0].rows)  # what is read and decoded within other kernels


def test_masks_beside_floats_leave_out_roundings_of_bf16_alone():
    model, x, y = case("vgg", rows=128)
    left = []
    for loss in (loss_of, amp_loss):
        _, (graph,) = run(loss, model, [(x, y)], Settings(lossy="fp8s"))
        left.append([row for row in graph.rows if row.reason == "rounding it would take a kernel of its own"])
        if loss is loss_of:
            assert graph.kept_bytes * 4 < graph.plain_bytes
    assert [bool(rows) for rows in left] == [False, True]


def chain(step_s):
    """Two activations: one is made from 1 byte for each of its own, the other from 2."""
    values = (
        Value("a", (), FREE, 0, 0, SECOND), Value("b", (), FREE, 1, 0, SECOND),
        Value("y", ("a",), CHEAP, 2, SECOND, SECOND, needed=True),
        Value("z", ("a", "b"), CHEAP, 3, SECOND, SECOND, needed=True),
    )  # fmt: skip
    return Flow({v.name: v for v in values}, step_s)


@pytest.mark.parametrize(("step_s", "rebuilt"), [(500.0, ["y", "z"]), (49.0, ["y"]), (10.0, [])])
def test_rebuilds_that_take_longest_for_their_bytes_are_left_out_first(step_s, rebuilt):
    choice = choose(chain(step_s), Limits(least_bytes=1, shares=(0.1,)))
    assert [cone.root for cone in choice.cones] == rebuilt
    assert sorted(c.root for c in choice.left_out) == sorted({"y", "z"} - set(rebuilt))
    assert sum(cone.time_s for cone in choice.cones) <= 0.1 * step_s
    assert set(choice.kept) == {"y", "z"} - set(rebuilt)  # of SECOND bytes each
    assert all("us by the model" in reason for reason in choice.reasons)


def test_a_product_takes_its_own_time():
    values = chain(0.0).values | {"y": replace(chain(0.0).values["y"], product_s=0.25)}
    choice = choose(Flow(values, float("inf")), Limits(least_bytes=1))
    assert [cone.time_s for cone in choice.cones] == [0.25, 3.0]


@pytest.mark.parametrize(("summed", "time_s"), [("", 0.5), ("y", 2.0), ("a", 2.0)])
def test_what_libraries_alone_read_is_written_by_a_kernel_that_reads_its_sources_anyhow(summed, time_s):
    """But not where that is a layer norm's, which sums its rows: of its input, or of that normalised."""
    values = chain(0.0).values
    values |= {"y": replace(values["y"], for_libraries=True)}
    values |= {name: replace(values[name], by_row=True) for name in summed}
    choice = choose(Flow(values, float("inf")), Limits(least_bytes=1))
    assert {cone.root: cone.time_s for cone in choice.cones}["y"] == time_s


@pytest.mark.parametrize(("shares", "rebuilt"), [((0.0, 0.1), ["y"]), ((0.1, 1.0), ["y"]), ((0.0, 1.0), ["y", "z"])])
def test_the_first_share_of_time_that_keeps_enough_less_is_taken(shares, rebuilt):
    choice = choose(chain(49.0), Limits(least_bytes=1, shares=shares))
    assert [cone.root for cone in choice.cones] == rebuilt


def test_rebuilds_may_take_what_the_step_spares():
    assert not choose(chain(10.0), Limits(least_bytes=1, shares=(0.1,))).cones
    spared = replace(chain(10.0), spare_s=4.0)
    assert [cone.root for cone in choose(spared, Limits(least_bytes=1, shares=(0.1,))).cones] == ["y", "z"]


@pytest.mark.parametrize(("enough", "rebuilds"), [(1.0, False), (1.5, True)])
def test_more_rebuilds_are_made_where_the_first_share_saves_too_little(monkeypatch, enough, rebuilds):
    monkeypatch.setitem(partitioner.SHARES, "bitwise", (0.0, float("inf")))
    monkeypatch.setattr("gistkit.planning.rebuilds.ENOUGH", enough)
    model, x, y = net_of("perceptron", 2048)
    _, (graph,) = run(loss_of, model, [(x, y)], Settings())
    assert any(row.form == "rebuild" for row in graph.rows) == rebuilds


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="reads Inductor's code by its private names")
def test_a_product_reads_a_rebuilt_tensor_as_it_is(monkeypatch):
    """Rounded anew for it, the bf16 output of a ReLU would be copied first."""
    gpu_code.pretend_gpu(monkeypatch)
    monkeypatch.setattr(gpu_code, "_code", lambda *_: ("", []))  # the graphs are enough
    pairs, rebuild = [], edit.rebuild
    monkeypatch.setattr(edit, "rebuild", lambda pair, cone: (pairs.append(pair), rebuild(pair, cone)))
    gpu_code.kernels(lambda: net_of("bottleneck", 256), amp_loss, Partitioner(Settings()))
    nodes = list(pairs[-1].backward.graph.nodes)
    read = [behind_views(n.args[0]) for n in nodes if n.target is torch.ops.gistkit.convolved.default]
    assert torch.ops.gistkit.materialised.default in {n.target for n in read}
    assert torch.ops.gistkit.rounded.default not in {n.target for n in read}


def test_what_only_forward_makes_stays():
    values = {"x": Value("x", (), MADE, 0, SECOND, SECOND, needed=True)}
    assert choose(Flow(values, 1.0), Limits(least_bytes=1)).cones == ()


def test_the_report_tells_what_was_left_out(monkeypatch):
    monkeypatch.setitem(partitioner.SHARES, "bitwise", (0.0,))
    model, x, y = net_of("perceptron", 2048)
    _, (graph,) = run(loss_of, model, [(x, y)], Settings())
    assert any("are left out" in note for note in graph.notes)
    assert not any(row.form == "rebuild" for row in graph.rows)
    _, (graph,) = run(loss_of, model, [(x, y)], Settings(budget="80%"))
    assert any(row.form == "rebuild" for row in graph.rows)


def test_rebuilds_that_free_no_bytes_are_not_made():
    """Three heads' copies of a product that takes as many bytes as two of them. With time for one rebuild, of 2 s each,
    the product would be kept for that copy alone."""
    values = (
        Value("x", (), MADE, 0, UNKEPT, SECOND), Value("product", ("x",), MADE, 1, 2 * SECOND, 2 * SECOND),
        *(Value(n, ("product",), CHEAP, i, SECOND, SECOND, needed=True) for i, n in enumerate("qkv", 2)),
    )  # fmt: skip
    flow = {v.name: v for v in values}
    plenty = choose(Flow(flow, 100.0), Limits(least_bytes=1, shares=(0.1,)))
    assert [cone.root for cone in plenty.cones] == ["q", "k", "v"] and plenty.kept == ("product",)
    little = choose(Flow(flow, 36.0), Limits(least_bytes=1, shares=(0.1,)))
    assert little.cones == () and little.kept == ("q", "k", "v")


def test_what_several_rebuilds_read_is_shared_by_what_they_save():
    """A residual sum and a product, kept for a norm's input in fp32 twice and for its bf16 output: by equal shares the
    output would free nothing, though both are kept without it."""
    values = (
        Value("sum", (), MADE, 0, 4 * SECOND, SECOND), Value("product", (), MADE, 1, 2 * SECOND, SECOND),
        Value("first", ("sum",), CHEAP, 2, 4 * SECOND, SECOND, needed=True),
        Value("norm", ("sum", "product"), CHEAP, 3, 4 * SECOND, SECOND, needed=True),
        Value("output", ("sum", "product"), CHEAP, 4, 2 * SECOND, SECOND, needed=True),
    )  # fmt: skip
    choice = choose(Flow({v.name: v for v in values}, 100.0), Limits(least_bytes=1))
    assert set(choice.kept) == {"sum", "product"} and not choice.left_out


@pytest.mark.parametrize(("groups", "rate"), [(1, OPERATIONS_A_S[4]), (32, OPERATIONS_A_S[4]), (64, DEPTHWISE_A_S)])
def test_a_convolutions_gradients_take_twice_its_own_operations(groups, rate):
    """PyTorch's formula counts a weight's gradient as if there were no groups: EfficientNet's 64 to 1,152 times."""
    graph = torch.fx.Graph()
    with torch.device("meta"):
        shapes = torch.empty(64, 64, 56, 56), torch.empty(64, 64, 56, 56), torch.empty(64, 64 // groups, 31, 31)
    nodes = [graph.placeholder(name) for name in ("gradient", "x", "weight")]
    for node, x in zip(nodes, shapes, strict=True):
        node.meta["val"] = x
    words = None, [1, 1], [15, 15], [1, 1], False, [0, 0], groups, [True, True, False]
    made = graph.call_function(torch.ops.aten.convolution_backward.default, (*nodes, *words))
    made.meta["val"] = (shapes[1], shapes[2], None)
    for number in (0, 1):
        graph.call_function(operator.getitem, (made, number)).meta["val"] = made.meta["val"][number]
    products = 64 * 64 * 56 * 56 * (64 // groups) * 31 * 31
    assert library_s(made) == pytest.approx(2 * 2 * products / rate)


@pytest.mark.parametrize(
    ("dims", "counted"), [([0, 2, 3], True), ([-1, 0], True), (None, True), ([3], False), ([-1], False)]
)
def test_sums_over_more_than_rows_count_in_a_steps_time(dims, counted):
    graph, x = torch.fx.Graph(), torch.empty(64, 64, 56, 56, device="meta")
    node = graph.placeholder("x")
    node.meta["val"] = x
    aten, given = torch.ops.aten, (node, dims)
    for target, args in ((aten.sum.dim_IntList, given), (aten.var_mean.correction, given if dims else given[:1])):
        graph.call_function(target, args).meta["val"] = x.sum(dims)
    pair = SimpleNamespace(forward=SimpleNamespace(graph=graph), backward=SimpleNamespace(graph=torch.fx.Graph()))
    assert step_s(pair, 26_000) == pytest.approx((4.5 * 26_000 + counted * 2 * 4 * x.numel()) / SECOND)
