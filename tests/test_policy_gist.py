"""The Gist policy: one rule, one graph, one decision at a time."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gistkit import formats, zoo
from gistkit.codecs import CODECS
from gistkit.graph.capture import capture
from gistkit.plan.plan import CallChoice, Plan
from gistkit.plan.policies.gist import gist
from tests.graphs import Apply, Double, Functional, Residual, captured, conv, fake_batch, output_of, the

N = 4 * 8 * 16 * 16


def decisions(graph, **options):
    return {d.storage: d for d in gist(graph, **options).decisions}


def decision(graph, op, nth=0, **options):
    """The decision for what the nth call of an op returned."""
    return decisions(graph, **options).get(output_of(graph, op, nth))


def choice(graph, op, nth=0, **options):
    covered = the(graph, op, nth).covered
    return next((c for c in gist(graph, **options).choices if c.covered == covered), CallChoice(covered, op))


# Binarize


def conv_relu_pool(**options):
    return captured(lambda m, x: m[1](F.max_pool2d(F.relu(m[0](x)), **options)), conv(), conv())


@pytest.mark.parametrize("kernel, bits", [(2, 4), (3, 4), ((3, 5), 4), (4, 8), (15, 8)])
def test_relu_before_a_pool_keeps_nothing_and_the_map_carries_the_mask(kernel, bits):
    graph = conv_relu_pool(kernel_size=kernel, stride=1)
    found = decision(graph, "relu")
    assert (found.codec, found.mask, found.reason) == ("drop", False, "the pool's map carries the mask")
    assert choice(graph, "relu").passes and choice(graph, "max_pool2d").zero_code
    index = next(s for s in graph.kept() if s.dtype == "int64")
    assert decisions(graph)[index.id].codec == f"argmax{bits}"


def test_windows_too_large_for_the_code_of_no_gradient():
    graph = conv_relu_pool(kernel_size=16, stride=1)
    assert decision(graph, "relu").codec == "mask1" and not choice(graph, "relu").passes
    index = next(s for s in graph.kept() if s.dtype == "int64")
    assert decisions(graph)[index.id].codec == "argmax8" and not choice(graph, "max_pool2d").zero_code
    larger = conv_relu_pool(kernel_size=(16, 17), stride=1, padding=(0, 1))
    index = next(s for s in larger.kept() if s.dtype == "int64")
    assert decisions(larger)[index.id].codec == "dense", "PyTorch's own pool runs"


SPOILERS = {
    "retain_grad": lambda m, y: y.retain_grad(),
    "register_hook": lambda m, y: y.register_hook(abs),
    "another pool": lambda m, y: F.avg_pool2d(y, 2),
    "a sum": lambda m, y: y.sum(),
    "a custom function": lambda m, y: Double.apply(y).sum(),
    "a view": lambda m, y: y.flatten(1).mean(),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", SPOILERS)
def test_any_other_reader_keeps_the_mask_with_the_relu(name, first):
    def forward(m, x):
        y = F.relu(m[0](x))
        other = SPOILERS[name](m, y) if first else None
        return F.max_pool2d(y, 2), other if first else SPOILERS[name](m, y)

    graph = captured(forward, conv())
    expected = "zvc" if name == "a custom function" else "mask1"
    assert decision(graph, "relu").codec == expected
    assert not choice(graph, "relu").passes and not choice(graph, "max_pool2d").zero_code


def test_an_output_of_the_model_is_left_where_it_lies():
    graph = captured(lambda m, x: (y := F.relu(m[0](x)), F.max_pool2d(y, 2)), conv())
    found = decision(graph, "relu")
    assert found.codec == "dense" and "still held outside the forward" in found.reason
    assert not choice(graph, "relu").passes


def test_relu_before_average_pooling_is_a_mask():
    graph = captured(lambda m, x: m[1](F.avg_pool2d(F.relu(m[0](x)), 2)), conv(), conv())
    found = decision(graph, "relu")
    assert (found.codec, found.reason) == ("mask1", "backward asks a ReLU output only for its sign")
    assert gist(graph).kept_bytes == 32768 + 8192 + formats.mask1_bytes(N)


def test_values_that_nobody_reads_are_dropped():
    graph = captured(lambda m, x: m[1](F.max_pool2d(m[0](x), 2)), conv(), conv())
    found = decision(graph, "conv2d")
    assert (found.codec, found.reason) == ("drop", "backward reads its shape only")
    assert not choice(graph, "max_pool2d").zero_code


# sparse storage


def test_relu_before_a_conv_is_sparse_and_one_stash_serves_a_skip_branch():
    def forward(m, x):
        y = F.relu(m[0](x))
        return m[1](y) + m[2](y) + y

    graph = captured(forward, conv(), conv(), conv())
    found = decision(graph, "relu")
    assert (found.codec, found.reason) == ("zvc", "conv2d reads its values, and 50% of them are zeros")
    assert [d.storage for d in gist(graph).decisions].count(found.storage) == 1


def test_relu_read_by_a_pool_and_a_conv_keeps_its_values():
    graph = captured(lambda m, x: (y := F.relu(m[0](x)), m[1](y) + m[1](F.max_pool2d(y, 1)))[1], conv(), conv())
    assert decision(graph, "relu").codec == "zvc"
    assert not choice(graph, "relu").passes and not choice(graph, "max_pool2d").zero_code


@pytest.mark.parametrize(
    "density, codec",
    [(0.0, "csr"), (0.1, "csr"), (0.118, "csr"), (0.12, "zvc"), (0.5, "zvc"), (0.91, "zvc"), (0.93, "dense")],
)
def test_the_measured_density_chooses_between_csr_zvc_and_dense(density, codec):
    graph = captured(lambda m, x: m[1](F.relu(m[0](x))), conv(), conv())
    relu = output_of(graph, "relu")
    found = decision(graph, "relu", densities={relu: density})
    assert found.codec == codec
    if codec == "dense":
        assert found.reason == "conv2d reads its values, and with 93% non-zeros no encoding pays"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.floats(0, 1), st.sampled_from([None, "fp16", "fp10", "fp8", "fp8s", "fp8t"]))
def test_the_choice_is_never_beaten_by_another_encoding(density, lossy):
    graph = RELU_CONV
    relu = output_of(graph, "relu")
    plan = gist(graph, lossy=lossy, densities={relu: density})
    n, mask = N, formats.mask1_bytes(N)
    names = ["zvc", "csr"] + ([f"zvc+{lossy}", f"csr+{lossy}"] if lossy else [])
    sizes = [CODECS[c].predicted_bytes(n, torch.float32, density) for c in names]
    sizes += [CODECS[lossy].predicted_bytes(n, torch.float32) + mask] if lossy else []
    others = sum(s.nbytes for s in graph.kept() if s.id != relu)
    assert plan.kept_bytes - others == (min(sizes) if min(sizes) <= 0.95 * n * 4 else n * 4)
    assert plan.kept_bytes <= plan.plain_bytes


RELU_CONV = captured(lambda m, x: m[1](F.relu(m[0](x))), conv(), conv())


def test_expected_densities_follow_pools_dropouts_and_concatenations():
    def reader_of(function):
        return captured(lambda m, x: m[1](function(F.relu(m[0](x)))), conv(), conv())

    assert decision(reader_of(lambda y: F.dropout(y, 0.5)), "dropout").reason.endswith("75% of them are zeros")
    assert decision(reader_of(lambda y: F.dropout(y, 0.2, training=False)), "relu").reason.endswith(
        "50% of them are zeros"
    )
    pooled = decision(reader_of(lambda y: F.max_pool2d(y, 2)), "max_pool2d")
    assert (
        pooled.codec == "dense" and pooled.reason == "conv2d reads its values, and with 94% non-zeros no encoding pays"
    )
    wide = captured(lambda m, x: m[1](torch.cat([F.relu(m[0](x)), F.relu(x)], 1)), conv(), nn.Conv2d(16, 8, 3))
    assert decision(wide, "cat").codec == "zvc"
    mixed = captured(lambda m, x: m[1](torch.cat([F.relu(m[0](x)), m[0](x)], 1)), conv(), nn.Conv2d(16, 8, 3))
    assert decision(mixed, "cat").codec == "dense"
    padded = captured(lambda m, x: m[1](F.relu(m[0](x))), conv(), conv(padding_mode="circular"))
    assert decision(padded, "relu").codec == "mask1" and decision(padded, "pad").codec == "zvc"
    dropped = captured(lambda m, x: m[1](F.dropout(m[0](x), 0.5)), conv(), conv())
    assert decision(dropped, "dropout").codec == "zvc"


def test_dropout_masks_are_bits():
    graph = captured(lambda m, x: F.dropout(m[0](x), 0.5).sum(), conv())
    mask = next(s for s in graph.kept() if s.producer == the(graph, "dropout").index)
    assert decisions(graph)[mask.id].codec == "bits"
    graph = captured(lambda m, x: torch.where(m[0](x) > 0, m[0](x), x), conv())
    assert "bits" in [d.codec for d in gist(graph).decisions]


# rebuilding


def recipes(graph, **options):
    return [d.recipe for d in gist(graph, **options).decisions if d.codec == "rebuild"]


def test_relu_of_a_batch_norm_is_rebuilt():
    graph = captured(lambda m, x: m[2](F.relu(m[1](m[0](x)))), conv(), nn.BatchNorm2d(8), conv())
    found = decision(graph, "relu")
    assert (found.codec, found.place, found.mask) == ("rebuild", "nowhere", True)
    assert found.recipe == ("relu", ("bn", the(graph, "batch_norm").covered))
    assert found.sources == (output_of(graph, "conv2d"),)
    assert decisions(graph)[found.sources[0]].codec == "dense"
    assert gist(graph).kept_bytes == graph.kept_bytes - N * 4 + formats.mask1_bytes(N)


def test_batch_norm_with_running_statistics_is_no_source():
    norm = nn.BatchNorm2d(8).eval()
    graph = captured(
        lambda m, x: m[1](F.relu(F.batch_norm(m[0](x), norm.running_mean, norm.running_var))), conv(), conv()
    )
    assert decision(graph, "relu").codec == "zvc"


def test_residual_blocks_are_rebuilt_from_their_terms():
    graph = captured(lambda m, x: m[2](m[1](m[0](x))), Residual(project=True), Residual(), conv())
    norms = [c.covered for c in graph.calls if c.op == "batch_norm"]
    down, first, second = norms[0], norms[2], norms[4]
    output = output_of(graph, "relu", 1)
    assert recipes(graph) == [
        ("relu", ("bn", norms[1])),
        ("relu", ("add", ("bn", first), ("bn", down))),
        ("relu", ("bn", norms[3])),
        ("relu", ("add", ("bn", second), ("stash", output))),
    ]
    last = decision(graph, "relu", 3)
    assert output in last.sources and last.reason == "follows from the terms of the addition"
    assert {decisions(graph)[s].codec for s in last.sources} == {"dense", "rebuild"}


def test_a_chain_of_rebuilt_blocks_is_cut():
    graph = captured(lambda m, x: nn.Sequential(*m)(x), Residual(project=True), *(Residual() for _ in range(5)), conv())
    blocks = [decision(graph, "relu", i).codec for i in range(1, 12, 2)]
    assert blocks == ["rebuild", "rebuild", "zvc", "rebuild", "rebuild", "zvc"]


def test_a_plain_skip_without_batch_norm_is_rebuilt_from_two_stashes_or_stored():
    def forward(m, x):
        a = F.relu(m[0](x))
        b = F.relu(m[1](a))
        c = F.relu(a + b)
        return m[2](c) + m[2](b)

    graph = captured(forward, conv(), conv(), conv())
    a, b = output_of(graph, "relu", 0), output_of(graph, "relu", 1)
    assert recipes(graph) == [("relu", ("add", ("stash", a), ("stash", b)))]


NOT_REBUILT = {
    "alpha": lambda n, c, y: torch.add(n, y, alpha=2),
    "broadcast": lambda n, c, y: n + F.relu(y.mean((2, 3), keepdim=True)),
    "a part": lambda n, c, y: n + y[:, :1],
    "a term that nobody keeps": lambda n, c, y: n + c,
    "another dtype": lambda n, c, y: n + y.double(),
    "in between": lambda n, c, y: (n + y) * 1,
    "a scalar": lambda n, c, y: n + 1,
}


@pytest.mark.parametrize("name", NOT_REBUILT)
def test_what_cannot_be_followed_exactly_is_stored(name):
    def forward(m, x):
        y = F.relu(m[0](x))
        norm, other = m[1](m[2](y)), m[3](y)
        z = F.relu(NOT_REBUILT[name](norm, other, y)).float()
        return m[0](z)

    graph = captured(forward, conv(), nn.BatchNorm2d(8), conv(), conv())
    assert recipes(graph) == []


def test_an_overwritten_term_is_no_source():
    def forward(m, x):
        norm = m[1](m[0](x))
        y = F.relu(m[0](x))
        z = m[2](y)
        t = y + 0.0 * z
        out = F.relu(norm + t)
        t.mul_(2)
        return m[2](out) + m[2](t)

    graph = captured(forward, conv(), nn.BatchNorm2d(8), conv())
    assert recipes(graph) == [], "t is kept as it is after the write, the sum took it before"


def test_very_sparse_outputs_are_stored_rather_than_rebuilt():
    graph = captured(lambda m, x: m[2](F.relu(m[1](m[0](x)))), conv(), nn.BatchNorm2d(8), conv())
    relu = output_of(graph, "relu")
    assert decision(graph, "relu", densities={relu: 0.001}).codec == "csr"


# lossy


def test_lossy_narrows_sparse_values_and_everything_else_read_by_value():
    graph = captured(lambda m, x: m[3](F.relu(m[2](F.relu(m[1](m[0](x)))))), conv(), nn.BatchNorm2d(8), conv(), conv())
    plan = {d.storage: d for d in gist(graph, lossy="fp8s").decisions}
    assert plan[output_of(graph, "conv2d")].codec == "fp8s", "batch norm's input"
    assert plan[output_of(graph, "relu", 0)].codec == "rebuild" and plan[output_of(graph, "relu", 0)].mask
    assert plan[output_of(graph, "relu", 1)].codec == "zvc+fp8s"
    assert plan[graph.kept()[0].id].reason == "held by the caller"
    dense = decision(graph, "relu", 1, lossy="fp8", densities={output_of(graph, "relu", 1): 1.0})
    assert (dense.codec, dense.mask) == ("fp8", True), "with no zeros the narrow copy and a mask are smaller"


@pytest.mark.parametrize("lossy", ["fp16", "fp10", "fp8", "fp16s", "fp10t", "fp8s"])
def test_masks_and_maps_are_never_narrowed(lossy):
    graph = conv_relu_pool(kernel_size=2)
    assert decision(graph, "relu", lossy=lossy).codec == "drop"
    index = next(s for s in graph.kept() if s.dtype == "int64")
    assert decisions(graph, lossy=lossy)[index.id].codec == "argmax4"
    assert decision(graph, "max_pool2d", lossy=lossy).codec in (lossy, f"zvc+{lossy}")


def test_exact_forms_win_where_narrow_ones_save_nothing():
    model = Apply(lambda m, x: m[1](F.relu(m[0](x))), conv(), conv()).bfloat16()
    graph = capture(model, (fake_batch(4, 8, 16, 16).bfloat16(),))
    assert decision(graph, "relu", lossy="fp16").codec == "zvc"
    plain = capture(
        Apply(lambda m, x: m[1](m[0](x)), conv(), conv()).bfloat16(), (fake_batch(4, 8, 16, 16).bfloat16(),)
    )
    assert decision(plain, "conv2d", lossy="fp16").codec == "dense"
    assert decision(plain, "conv2d", lossy="fp8").codec == "fp8"


def test_divisors_and_logarithms_stay_exact():
    graph = captured(lambda m, x: (x / m[0](x).exp()).sum(), conv())
    found = decision(graph, "exp", lossy="fp8")
    assert found.codec == "dense"
    assert found.reason == "exp reads its values exactly, and nothing speaks for zeros in them"
    assert {d.codec for d in gist(graph, lossy="fp8").decisions} == {"dense"}


@pytest.mark.parametrize("lossy", ["fp7", "FP8", "fp8x", "zvc", 8])
def test_unknown_formats(lossy):
    with pytest.raises(ValueError) as info:
        gist(RELU_CONV, lossy=lossy)
    text = str(info.value)
    assert f'got lossy="{lossy}"' in text and "lossy must be None or one of fp16, fp10, fp8, fp16s" in text


# everything else


def test_small_inputs_integers_doubles_and_parts_stay_dense():
    graph = captured(lambda m, x: m[1](F.relu(m[0](x))), conv(), conv(), shape=(1, 8, 8, 8))
    assert {d.reason for d in gist(graph).decisions} == {"held by the caller", "too small to pay"}
    model = Apply(lambda m, x: m[1](F.relu(m[0](x))), conv(), conv()).double()
    graph = capture(model, (fake_batch(4, 8, 16, 16).double(),))
    assert decision(graph, "relu").reason == "no codec for float64"
    parts = captured(lambda m, x: m[1](m[0](x)[:, :4]), conv(), nn.Conv2d(4, 8, 1))
    assert decision(parts, "conv2d").reason == "saved in parts, or as something else than one whole value"


def test_a_storage_saved_before_and_after_a_write_is_left_alone():
    graph = captured(lambda m, x: (y := m[0](x), a := y * y, y.add_(1), (a + y * y).sum())[-1], conv())
    found = decision(graph, "conv2d", lossy="fp8")
    assert (found.codec, found.reason) == ("dense", "saved in parts, or as something else than one whole value")


def test_relus_run_in_place_where_their_input_has_no_other_use():
    graph = captured(lambda m, x: m[1](F.relu(m[0](x))), conv(), conv())
    assert choice(graph, "relu").inplace
    for spoiler in (
        lambda m, x: F.relu(x),
        lambda m, x: F.relu(m[1](m[0](x)).sigmoid()),
        lambda m, x: (y := m[0](x), F.relu(y) + y)[1],
        lambda m, x: (y := m[0](x), y.mean(), F.relu(y))[2],
        lambda m, x: F.relu(m[0](x)[:, :4]),
        lambda m, x: F.relu(m[0](x).view(4, -1)),
        lambda m, x: F.relu(m[0](x), inplace=True),
        lambda m, x: (y := m[0](x), F.relu(y))[::1],
    ):
        assert not choice(captured(spoiler, conv(), conv()), "relu").inplace


def test_a_transformer_gains_nothing_lossless_and_is_told_why():
    layer = nn.TransformerEncoderLayer(64, 4, 128, activation="gelu", dropout=0.0, batch_first=True)
    graph = capture(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (fake_batch(8, 32, 64),))
    plan = gist(graph)
    assert plan.kept_bytes == plan.plain_bytes and plan.choices == ()
    assert {d.codec for d in plan.decisions} == {"dense"}
    assert all(d.reason for d in plan.decisions)
    assert "gelu reads its values, and nothing speaks for zeros in them" in {d.reason for d in plan.decisions}
    assert gist(graph, lossy="fp8").kept_bytes < 0.7 * plan.plain_bytes


@pytest.mark.parametrize("lossy", [None, "fp8", "fp10s"])
@pytest.mark.parametrize(
    "make, shape",
    [(Functional, (4, 8, 16, 16)), (lambda: zoo.resnet18(10), (2, 3, 64, 64)), (zoo.nin, (2, 3, 224, 224))],
)
def test_plans_cover_every_kept_storage_once_and_survive_json(make, shape, lossy):
    graph = capture(make(), (fake_batch(*shape),))
    plan = gist(graph, lossy=lossy)
    assert [d.storage for d in plan.decisions] == [s.id for s in graph.kept()]
    assert Plan.from_json(plan.to_json()) == plan
    assert (plan.policy, plan.fingerprint, plan.settings) == ("gist", graph.fingerprint, {"lossy": lossy})
    assert plan.plain_bytes == graph.kept_bytes >= plan.kept_bytes
    assert all(d.codec in CODECS or d.codec in ("rebuild", "drop") for d in plan.decisions)
    assert all(d.reason for d in plan.decisions)
    assert all((d.place == "nowhere") == (d.codec == "rebuild") for d in plan.decisions)
    covered = {c.covered: c.op for c in graph.calls}
    assert all(covered[c.covered] == c.op for c in plan.choices)


@pytest.mark.parametrize(
    "name, lossy, least",
    [("vgg16", None, 3.0), ("vgg16", "fp8", 9.0), ("resnet50", None, 1.4), ("resnet50", "fp8s", 5.0)],
)
def test_predicted_ratios_of_the_papers_networks(name, lossy, least):
    graph = capture(getattr(zoo, name)(), (fake_batch(16, 3, 224, 224),))
    plan = gist(graph, lossy=lossy)
    assert plan.plain_bytes / plan.kept_bytes >= least
