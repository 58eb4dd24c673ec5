"""The choice of rebuilds: on made-up flows, and on networks whose partitioned graphs run without Inductor."""

import copy
import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._inductor.graph import GraphLowering
from torch.nn import functional as F

from gistkit.compiled import compat
from gistkit.compiled.edit import rebuild
from gistkit.compiled.late import rebuild_late
from gistkit.compiled.rebuilds.arithmetic import UNCERTAIN, WITHIN, Arithmetic
from gistkit.compiled.rebuilds.cones import planned, readers_first
from gistkit.compiled.rebuilds.flow import describe
from gistkit.compiled.rebuilds.rounding import Roundings
from gistkit.compiled.split import value
from gistkit.planning.flow import CHEAP, FREE, MADE, Flow, Limits, Value, cheapest
from gistkit.planning.rebuilds import choose
from tests.support.compiled_cases import NETS, Residual, assert_same, case, plain_step, resnet, run_edited

SMALL = Limits(least_bytes=1)
aten = torch.ops.aten


def flow_of(*rows):
    """A flow of rows (name, inputs, kind, bytes, needed); each has a storage of its own."""
    values = [Value(n, tuple(i), kind, k, size, size, needed) for k, (n, i, kind, size, needed) in enumerate(rows)]
    return Flow({v.name: v for v in values})


def kept_bytes(flow, choice):
    """Bytes between forward and backward, packed."""
    return sum({flow.values[n].storage: flow.values[n].weight for n in choice.kept}.values())


def depths(flow, choice):
    """For each rebuild the rebuilt tensors that it is computed from, one from the other, itself included."""
    found = {}
    for cone in choice.cones:
        here = {n: found[n] for n in cone.rebuilt_leaves}
        for v in map(flow.values.get, cone.nodes):
            own = v.name == cone.root or (v.needed and not v.view)
            here[v.name] = max((here.get(n, 0) for n in v.inputs), default=0) + own
        found[cone.root] = here[cone.root]
    return list(found.values())


def norm_flow():
    """A convolution's output, which only a norm's input statistics and two needed tensors are made of."""
    return flow_of(
        ("conv", "", MADE, 100, False),
        ("mean", ["conv"], MADE, 2, False),
        ("gain", "", FREE, 2, False),
        ("normed", ["conv", "mean", "gain"], CHEAP, 100, True),
        ("active", ["normed"], CHEAP, 100, True),
    )


def test_of_equal_sources_the_nearest_is_kept():
    flow = norm_flow()
    choice = choose(flow, SMALL)
    assert choice.kept == ("normed",)  # as cheap as the convolution's output, and nearer to backward
    assert kept_bytes(flow, choice) == 100 and flow.plain_bytes() == 200


def test_a_source_is_kept_where_it_serves_what_no_other_can():
    """Two needed tensors, neither of which can be made from the other, are made from what both come from."""
    rows = ("conv", "", MADE, 100, False), ("a", ["conv"], CHEAP, 80, True), ("b", ["conv"], CHEAP, 80, True)
    flow = flow_of(*rows)
    choice = choose(flow, SMALL)
    assert choice.kept == ("conv",) and kept_bytes(flow, choice) == 100
    assert [cone.root for cone in choice.cones] == ["a", "b"]
    assert all(cone.extra_leaves == ("conv",) and cone.saved_bytes == 80 for cone in choice.cones)
    assert [cone.read_bytes for cone in choice.cones] == [80, 80]  # of the source as much as they make


def chain_flow(length):
    """A residual chain: each sum is needed, each is made of the last one and of a branch that is needed anyhow."""
    rows = [("x0", "", MADE, 100, True)]
    for i in range(1, length):
        rows.append((f"branch{i}", "", MADE, 100, True))
        rows.append((f"x{i}", [f"x{i - 1}", f"branch{i}"], CHEAP, 100, True))
    return flow_of(*rows)


@pytest.mark.parametrize(
    ("depth", "reads"), [(1, 99.0), (2, 99.0), (3, 99.0), (99, 2.0), (99, 3.0), (99, 5.0), (3, 3.0), (99, 99.0)]
)
def test_limits_put_a_kept_tensor_into_a_chain_as_seldom_as_they_allow(depth, reads):
    flow = chain_flow(13)
    choice = choose(flow, Limits(depth, reads, least_bytes=1))
    assert max(depths(flow, choice)) <= depth and all(cone.read_bytes <= reads * 100 for cone in choice.cones)
    apart = int(min(depth, reads - 1))  # k sums in a row: depth k, k branches and one sum are read
    assert len(choice.cones) == 12 - 12 // (apart + 1)
    assert kept_bytes(flow, choice) == 25 * 100 - 100 * len(choice.cones)


def test_a_rebuild_reads_another_that_forward_loads_from_memory():
    values = chain_flow(5).values
    values |= {f"x{i}": replace(values[f"x{i}"], loads=frozenset({f"x{i - 1}"})) for i in range(1, 5)}
    flow = Flow(values)
    choice = choose(flow, Limits(depth=3, least_bytes=1))
    cones = {cone.root: cone for cone in choice.cones}
    assert [cones[f"x{i}"].rebuilt_leaves for i in (1, 2, 3)] == [(), ("x1",), ("x2",)]
    assert depths(flow, choice) == [1, 2, 3] and "x4" in choice.kept
    assert {cone.nodes for cone in choice.cones} == {("x1",), ("x2",), ("x3",)}  # each is computed once
    assert kept_bytes(flow, choice) == flow.plain_bytes() - 300


@pytest.mark.parametrize("made", [rebuild, rebuild_late])
def test_a_chain_of_blocks_is_rebuilt_from_buffers(made):
    (model, x, y), seen = case("chain"), []

    def edit(pair):
        _, cones = planned(pair, Limits(least_bytes=1))
        seen.extend(cone for cone in cones if cone.loaded)
        for cone in readers_first(reversed(cones)):
            made(pair, cone)

    assert_same(plain_step("chain"), run_edited(edit, model, x, y))
    assert seen


def test_small_tensors_stay():
    flow = chain_flow(3)
    choice = choose(flow, Limits(least_bytes=101))
    assert choice.cones == () and kept_bytes(flow, choice) == flow.plain_bytes()
    choice = choose(flow, Limits(least_bytes=1, least_share=0.25))
    assert choice.cones == ()


def test_choices_are_reproducible():
    assert len({choose(chain_flow(13), SMALL) for _ in range(3)}) == 1


def random_flow(seed):
    """Up to nine values with random inputs, sizes and readers."""
    draw = random.Random(seed)
    rows = []
    for i in range(draw.randint(3, 9)):
        inputs = draw.sample(range(i), min(i, draw.randint(0, 2)))
        kind = CHEAP if inputs and draw.random() < 0.8 else MADE
        rows.append((f"v{i}", [f"v{j}" for j in inputs], kind, draw.randint(1, 20), draw.random() < 0.5))
    return flow_of(*rows)


@pytest.mark.parametrize("seed", range(60))
def test_the_cut_is_the_cheapest_of_all(seed):
    flow = random_flow(seed)
    roots = [v.name for v in flow.needed()]
    names = list(flow.values)

    def enough(kept):
        def there(name):
            v = flow.values[name]
            return name in kept or (v.kind == CHEAP and all(map(there, v.inputs)))

        return all(map(there, roots))

    def weigh(kept):
        return sum(flow.values[n].weight for n in kept)

    kept = cheapest(flow, roots, lambda v: v.kind == CHEAP, lambda v: v.weight, ())
    subsets = (set(s) for n in range(len(names) + 1) for s in itertools.combinations(names, n))
    assert enough(kept)
    assert weigh(kept) == min(weigh(s) for s in subsets if enough(s))


class Gate(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, width):
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.up(F.silu(self.down(x.mean((2, 3), keepdim=True)))))


class Inverted(nn.Module):
    """A block of MobileNet or EfficientNet."""

    def __init__(self, width, act):
        super().__init__()
        wide = 4 * width
        self.expand, self.norm1 = nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.depth, self.norm2 = nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide)
        self.gate, self.act = Gate(wide), act
        self.project, self.norm3 = nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        y = self.act(self.norm2(self.depth(self.act(self.norm1(self.expand(x))))))
        return x + self.norm3(self.project(self.gate(y)))


def squared_relu(x):
    return F.relu(x).square()


class Gated(nn.Module):
    """An RMS norm and a gated product, SwiGLU's, GEGLU's and a squared ReLU's, with residuals."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Linear(48, 32), nn.RMSNorm(32)
        self.up, self.down, self.head = nn.Linear(32, 128), nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = self.embed(x.permute(0, 2, 1, 3).flatten(2))
        for act in (F.silu, F.gelu, squared_relu):
            a, b = self.up(self.norm(x)).chunk(2, -1)
            x = x + self.down(act(a) * b)
        return self.head(x.mean(1))


def images_net(*blocks):
    return nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


CASES = {
    "chain": lambda: resnet(Residual(8, 8), Residual(8, 8)),
    "mobile": lambda: images_net(Inverted(8, F.silu), Inverted(8, F.hardswish)),
    "gated": Gated,
    "group norm": lambda: images_net(nn.GroupNorm(2, 8), nn.GELU("tanh"), nn.Conv2d(8, 8, 3, 1, 1), nn.GELU()),
}
NETS.update(CASES)


@pytest.mark.parametrize(
    ("name", "made", "gain", "dynamic"),
    [
        *(("resnet", rebuild, 1.2, False), ("block", rebuild_late, 1.3, False), ("mobile", rebuild_late, 1.6, False)),
        *(("group norm", rebuild_late, 1.3, False), ("gated", rebuild, 1.5, True), ("one conv", rebuild, 1.2, True)),
    ],
)
def test_rebuilt_networks_have_the_same_bits(name, made, gain, dynamic):
    """``dynamic``: over symbolic sizes. Graphs run as they are, so rebuilds of any class have the same bits."""
    found, limits = [], Limits(least_bytes=256, bitwise=name not in ("group norm", "one conv"))
    model, x, y = case(name)

    def edit(pair):
        flow = describe(pair, None, limits)
        choice, cones = planned(pair, limits)
        for cone in cones:
            made(pair, cone)
        found.append((flow, choice, {node.target for cone in cones for node in cone.nodes}))

    assert_same(plain_step(name), run_edited(edit, model, x, y, dynamic=dynamic))
    ((flow, choice, anew),) = found
    assert name != "gated" or torch.ops.aten.relu.default in anew  # the squared ReLU's, so its square too
    assert choice.cones and flow.plain_bytes() > gain * kept_bytes(flow, choice)
    assert max(depths(flow, choice)) <= 4
    if limits.bitwise:
        assert all(flow.values[n].follows for cone in choice.cones for n in cone.nodes)
        assert all(flow.values[n].settled for cone in choice.cones for n in cone.extra_leaves)
    assert len(choice.reasons) == len(choice.kept) and all(choice.reasons)


def pair_of(function):
    """The pair of a function's step under bf16 autocast, its nodes by name, and its product with 1.5."""
    pairs = []

    def edit(pair):
        pairs.append((pair, describe(pair, None, Limits())))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 48))
            self.head = nn.Linear(32, 10)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.head(function(F.linear(x.flatten(2).mean(1)[:, :48], self.weight))).float()

    _, x, y = case("conv")
    run_edited(edit, Net(), x, y)
    pair, flow = pairs[0]
    product = next(n for n in pair.forward.graph.nodes if n.target is aten.mul.Tensor and n.args[1] == 1.5)
    return pair, flow, product


def test_a_low_precision_value_that_a_kernel_may_or_may_not_round_is_not_rebuilt():
    """exp and tanh both read a bf16 product that nothing keeps: fused it is fp32 for them, alone it is bf16."""
    pair, flow, product = pair_of(lambda h: (g := h * 1.5).exp() * g.tanh())
    assert value(product).dtype is torch.bfloat16
    roundings = Roundings(pair, bitwise=True)
    assert roundings.exact(product.args[0])  # a matrix product's output comes from memory
    readers = [n for n in product.users if n.op != "output"]
    assert len(readers) > 1
    assert not any(flow.values[n.name].follows for n in readers)


def test_the_only_reader_of_a_low_precision_value_is_rebuilt_with_it():
    _, flow, product = pair_of(lambda h: (h * 1.5).relu())
    assert [flow.values[n.name].follows for n in product.users] == [True]


def test_images_are_laid_out_as_if_gistkit_added_no_nodes(monkeypatch):
    """Inductor lays images out anew where a graph has fewer than 300 nodes for a convolution. A DINOv2 of two blocks
    has that plainly, but not with what gistkit adds, and all its gradients had other bits on an H200."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    decisions = []

    def edit(pair):
        decisions.append(compat.prefers_channels_last(pair.forward))
        grown = copy.deepcopy(pair.forward)
        with grown.graph.inserting_before(grown.graph.output_node()):
            for _ in range(300):
                grown.graph.call_function(aten.neg.default, (next(iter(grown.graph.nodes)),))
        decisions.append(compat.prefers_channels_last(grown))
        decisions.append(GraphLowering.decide_layout_opt(grown, is_inference=False))
        grown.graph.output_node().meta.clear()
        decisions.append(GraphLowering.decide_layout_opt(grown, is_inference=False))
        decisions.append(GraphLowering.decide_layout_opt(pair.backward, is_inference=False))

    _, x, y = case("conv")
    run_edited(edit, nn.Sequential(nn.Conv2d(3, 96, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)), x, y)
    assert decisions == [True, True, True, False, False]


def test_a_norm_over_channels_is_not_followed_where_images_are_laid_out_anew():
    """ConvNeXtV2 with contiguous images: their channels come to lie innermost, so one kernel sums and normalises, and
    divides and subtracts in one operation. The graph's strides do not tell: 4 of 213 tensors differed on an H200."""
    places = []

    def edit(pair):
        norms = (n for n in pair.forward.graph.nodes if n.target is aten.var_mean.correction)
        places.extend(Arithmetic(pair, True).place(norm) for norm in norms)

    class Normed(nn.Module):
        def __init__(self, last):
            super().__init__()
            self.last, self.conv, self.norm = last, nn.Conv2d(3, 24, 3), nn.LayerNorm(24)

        def forward(self, x):
            x = self.conv(x).permute(0, 2, 3, 1)
            return self.norm(x if self.last else x.flatten(1, 2)).flatten(1, -2).mean(1)[:, :10]

    _, x, y = case("conv")
    for last in (True, False):
        run_edited(edit, Normed(last), x, y)
    assert places == [UNCERTAIN, WITHIN]


@pytest.mark.parametrize("operation", [torch.add, torch.sub])
def test_a_sum_of_two_products_is_not_rebuilt(operation):
    """Qwen3's rotary embedding behind a norm: a GPU makes one operation of the sum and one product, by the order in
    which a kernel loads their operands, and 70 of 78 tensors differed on an H200. One product leaves no choice."""
    for more, follows in ((lambda h: h.float() * 2.5, False), (lambda h: h.float(), True)):
        _, flow, product = pair_of(lambda h, more=more: operation(h.float() * 1.5, more(h)).exp())
        (total,) = product.users
        assert flow.values[total.name].follows is follows
    _, flow, product = pair_of(lambda h: operation(h.float() * 1.5, h.float(), alpha=2).exp())
    (total,) = product.users
    assert total.kwargs == {"alpha": 2} and not flow.values[total.name].follows


def test_a_cpu_has_other_bits_of_a_cosine_in_loops_over_vectors():
    """Mistral in transformers, with dropout: forward computed its keys' rotary embedding one by one, backward by
    vectors, and 12 of 22 gradients were others."""
    pair, _, product = pair_of(lambda h: (wide := h.float() * 1.5).cos() * wide.exp())
    readers = {n.target: n for n in product.users}
    same, any_kernels = (Roundings(pair, bitwise) for bitwise in (True, False))
    cosine, exponential = readers[aten.cos.default], readers[aten.exp.default]
    assert not same.follows(cosine) and same.follows(exponential) and any_kernels.follows(cosine)


def test_what_stands_between_two_kernels_is_not_thereby_in_memory():
    """The gate of a squeeze and excitation reads the activation behind a product, but nothing wrote it to memory."""

    def gate(h):
        wide = h * 1.5
        return wide * F.linear(wide.sum(1, keepdim=True), torch.ones(32, 1))

    _, flow, product = pair_of(gate)
    gated = [n for n in product.users if n.target is aten.mul.Tensor]
    assert [flow.values[n.name].follows for n in gated] == [False]
