"""The Gist policy where values are read: sparse storage, delayed precision reduction, what stays dense."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gistkit import formats
from gistkit.capture.entry import capture
from gistkit.codecs import CODECS
from gistkit.planning.policies.gist_rules import gist
from tests.support.graphs import Apply, N, captured, conv, decision, fake_batch, output_of

RELU_CONV = captured(lambda m, x: m[1](F.relu(m[0](x))), conv(), conv())


def test_relu_before_a_conv_is_sparse_and_one_stash_serves_a_skip_branch():
    def forward(m, x):
        y = F.relu(m[0](x))
        return m[1](y) + m[2](y) + y

    graph = captured(forward, conv(), conv(), conv())
    found = decision(graph, "relu")
    assert (found.codec, found.reason) == ("zvc", "conv2d reads its values, and 50% of them are zeros")
    assert [d.storage for d in gist(graph).decisions].count(found.storage) == 1


@pytest.mark.parametrize(
    "density, codec",
    [(0.0, "csr"), (0.1, "csr"), (0.118, "csr"), (0.12, "zvc"), (0.5, "zvc"), (0.91, "zvc"), (0.93, "dense")],
)
def test_the_measured_density_chooses_between_csr_zvc_and_dense(density, codec):
    found = decision(RELU_CONV, "relu", densities={output_of(RELU_CONV, "relu"): density})
    assert found.codec == codec
    if codec == "dense":
        assert found.reason == "conv2d reads its values, and with 93% non-zeros no encoding pays"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.floats(0, 1), st.sampled_from([None, "fp16", "fp10", "fp8", "fp8s"]))
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


def test_expected_densities_follow_pools_dropouts_and_concatenations():
    def reader_of(function):
        return captured(lambda m, x: m[1](function(F.relu(m[0](x)))), conv(), conv())

    assert decision(reader_of(lambda y: F.dropout(y, 0.5)), "dropout").reason.endswith("75% of them are zeros")
    silent = decision(reader_of(lambda y: F.dropout(y, 0.2, training=False)), "relu")
    assert silent.reason.endswith("50% of them are zeros")
    pooled = decision(reader_of(lambda y: F.max_pool2d(y, 2)), "max_pool2d")
    assert pooled.codec == "dense" and pooled.reason.endswith("and with 94% non-zeros no encoding pays")
    wide = captured(lambda m, x: m[1](torch.cat([F.relu(m[0](x)), F.relu(x)], 1)), conv(), nn.Conv2d(16, 8, 3))
    assert decision(wide, "cat").codec == "zvc"
    mixed = captured(lambda m, x: m[1](torch.cat([F.relu(m[0](x)), m[0](x)], 1)), conv(), nn.Conv2d(16, 8, 3))
    assert decision(mixed, "cat").codec == "dense"
    padded = captured(lambda m, x: m[1](F.relu(m[0](x))), conv(), conv(padding_mode="circular"))
    assert decision(padded, "relu").codec == "mask1" and decision(padded, "pad").codec == "zvc"
    dropped = captured(lambda m, x: m[1](F.dropout(m[0](x), 0.5)), conv(), conv())
    assert decision(dropped, "dropout").codec == "zvc"
    behind = reader_of(lambda y: F.dropout(y, 0.5))
    all_zeros = decision(behind, "dropout", densities={output_of(behind, "relu"): 0.0})
    assert all_zeros.reason.endswith("100% of them are zeros"), "a measured density of 0 is no missing one"


def test_lossy_narrows_sparse_values_and_everything_else_read_by_value():
    graph = captured(lambda m, x: m[3](F.relu(m[2](F.relu(m[1](m[0](x)))))), conv(), nn.BatchNorm2d(8), conv(), conv())
    plan = {d.storage: d for d in gist(graph, lossy="fp8s").decisions}
    assert plan[output_of(graph, "conv2d")].codec == "fp8s", "batch norm's input"
    assert plan[output_of(graph, "relu", 0)].codec == "rebuild" and plan[output_of(graph, "relu", 0)].mask
    assert plan[output_of(graph, "relu", 1)].codec == "zvc+fp8s"
    assert plan[graph.kept()[0].id].reason == "held by the caller"
    dense = decision(graph, "relu", 1, lossy="fp8", densities={output_of(graph, "relu", 1): 1.0})
    assert (dense.codec, dense.mask) == ("fp8", True), "with no zeros the narrow copy and a mask are smaller"


def test_divisors_and_logarithms_stay_exact():
    graph = captured(lambda m, x: (x / m[0](x).exp()).sum(), conv())
    found = decision(graph, "exp", lossy="fp8")
    assert found.codec == "dense"
    assert found.reason == "exp reads its values exactly, and nothing speaks for zeros in them"
    assert {d.codec for d in gist(graph, lossy="fp8").decisions} == {"dense"}


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
