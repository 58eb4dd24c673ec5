"""The Gist policy: one rule, one graph, one decision at a time."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

from gistkit import zoo
from gistkit.capture.entry import capture
from gistkit.codecs import CODECS
from gistkit.ir.plan import Plan
from gistkit.planning.policies.gist_rules import SPARED, SPARED_EACH, Planner, gist
from tests.support.graphs import Double, Functional, captured, choice, conv, decision, decisions, fake_batch, the


def conv_relu_pool(**options):
    return captured(lambda m, x: m[1](F.max_pool2d(F.relu(m[0](x)), **options)), conv(), conv())


@pytest.mark.parametrize("kernel, bits", [(2, 4), (3, 4), ((3, 5), 4), (4, 8), (15, 8)])
def test_relu_before_a_pool_keeps_nothing_and_the_map_carries_the_mask(kernel, bits):
    graph = conv_relu_pool(kernel_size=kernel, stride=1)
    found = decision(graph, "relu")
    assert (found.codec, found.mask, found.reason) == ("drop", False, "the pool's map carries the mask")
    assert choice(graph, "relu").mask_in_pool and choice(graph, "max_pool2d").mask_in_pool
    index = next(s for s in graph.kept() if s.dtype == "int64")
    assert decisions(graph)[index.id].codec == f"argmax{bits}"


def test_windows_too_large_for_the_code_of_no_gradient():
    graph = conv_relu_pool(kernel_size=16, stride=1)
    assert decision(graph, "relu").codec == "mask1" and not choice(graph, "relu").mask_in_pool
    assert not choice(graph, "max_pool2d").mask_in_pool
    larger = conv_relu_pool(kernel_size=(16, 17), stride=1, padding=(0, 1))
    for found, codec in ((graph, "argmax8"), (larger, "dense")):  # dense: PyTorch's own pool runs
        assert decisions(found)[next(s.id for s in found.kept() if s.dtype == "int64")].codec == codec


def uneven(small_width, small=30, large=12):
    """ReLUs that convolutions read, many of them far smaller than the rest."""
    widths = [8, *[64] * large, *[small_width] * small, 8]
    convs = [torch.nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(widths)]
    return captured(lambda m, x: functools.reduce(lambda y, f: F.relu(f(y)), m, x), *convs)


@pytest.mark.parametrize("lossy", [None, "int2s"], ids=["half of the bytes gained", "most of them"])
def test_the_smallest_encodings_are_left_out_for_the_hosts_time_up_to_a_share_of_gain_and_rest(lossy):
    graph = uneven(2)
    whole, spared = gist(graph, lossy=lossy), gist(graph, lossy=lossy, spares_host=True)
    planner = Planner(graph, lossy, None, True, True)
    saved = {d.storage: graph.storages[d.storage].nbytes - planner.predicted_bytes(d) for d in whole.decisions}
    left = {d.storage for d in spared.decisions if "too small for the host's time" in d.reason}
    assert 0 < len(left) < 30
    most = SPARED * min(whole.kept_bytes, sum(saved.values()))
    given_up, smallest = sum(saved[s] for s in left), min(saved[d.storage] for d in spared.decisions if not d.stays)
    assert given_up <= most < given_up + smallest, "no more, and no less, than is given up"
    assert max(saved[s] for s in left) <= SPARED_EACH * graph.kept_bytes
    assert spared.kept_bytes == whole.kept_bytes + sum(saved[s] for s in left)
    assert [d for d in spared.decisions if d.storage not in left] == [
        d for d in whole.decisions if d.storage not in left
    ]
    found = next(d for d in spared.decisions if d.storage in left)
    mib = f"{saved[found.storage] / 2**20:.2f} of {graph.kept_bytes / 2**20:.2f} MiB"
    assert (found.codec, found.reason) == ("dense", f"too small for the host's time: {mib}")


def test_no_encoding_is_left_out_that_saves_a_256th_nor_a_map_that_its_operator_makes():
    graph = uneven(8, small=2)
    assert gist(graph, spares_host=True).decisions == gist(graph).decisions
    pooled = lambda m, x: F.max_pool2d(F.max_pool2d(F.max_pool2d(m[0](x), 2), 2), 2)  # noqa: E731
    pools = captured(lambda m, x: m[1](pooled(m, x)).exp(), conv(), torch.nn.Conv2d(8, 4096, 1), shape=(4, 8, 64, 64))
    found = gist(pools, spares_host=True).decisions
    saved = min(pools.storages[d.storage].nbytes for d in found if d.codec == "argmax4")
    assert saved < SPARED_EACH * pools.kept_bytes and found == gist(pools).decisions


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
    assert not choice(graph, "relu").mask_in_pool and not choice(graph, "max_pool2d").mask_in_pool


def test_an_output_of_the_model_is_left_where_it_lies():
    graph = captured(lambda m, x: (y := F.relu(m[0](x)), F.max_pool2d(y, 2)), conv())
    found = decision(graph, "relu")
    assert found.codec == "dense" and "still held outside the forward" in found.reason
    assert not choice(graph, "relu").mask_in_pool


def test_values_that_nobody_reads_are_dropped():
    graph = captured(lambda m, x: m[1](F.max_pool2d(m[0](x), 2)), conv(), conv())
    found = decision(graph, "conv2d")
    assert (found.codec, found.reason) == ("drop", "backward reads its shape only")
    assert not choice(graph, "max_pool2d").mask_in_pool


def test_dropout_masks_are_bits():
    graph = captured(lambda m, x: F.dropout(m[0](x), 0.5).sum(), conv())
    mask = next(s for s in graph.kept() if s.producer == the(graph, "dropout").index)
    assert decisions(graph)[mask.id].codec == "bits"
    graph = captured(lambda m, x: torch.where(m[0](x) > 0, m[0](x), x), conv())
    assert "bits" in [d.codec for d in gist(graph).decisions]


@pytest.mark.parametrize("lossy", ["fp10", "fp8s"])
def test_masks_and_maps_are_never_narrowed(lossy):
    graph = conv_relu_pool(kernel_size=2)
    assert decision(graph, "relu", lossy=lossy).codec == "drop"
    index = next(s for s in graph.kept() if s.dtype == "int64")
    assert decisions(graph, lossy=lossy)[index.id].codec == "argmax4"
    assert decision(graph, "max_pool2d", lossy=lossy).codec in (lossy, f"zvc+{lossy}")


@pytest.mark.parametrize("lossy", [None, "fp8"])
@pytest.mark.parametrize("make, shape", [(Functional, (4, 8, 16, 16)), (lambda: zoo.resnet18(10), (2, 3, 64, 64))])
def test_plans_cover_every_kept_storage_once_and_survive_json(make, shape, lossy):
    graph = capture(make(), (fake_batch(*shape),))
    plan = gist(graph, lossy=lossy)
    assert [d.storage for d in plan.decisions] == [s.id for s in graph.kept()]
    assert Plan.from_json(plan.to_json()) == plan
    assert (plan.policy, plan.fingerprint, plan.details) == ("gist", graph.fingerprint, {"lossy": lossy})
    assert plan.plain_bytes == graph.kept_bytes >= plan.kept_bytes
    assert all(d.codec in CODECS or d.codec in ("rebuild", "drop") for d in plan.decisions)
    assert all(d.reason for d in plan.decisions)
    assert all((d.place == "nowhere") == (d.codec == "rebuild") for d in plan.decisions)
    covered = {c.covered: c.op for c in graph.calls}
    assert all(covered[c.covered] == c.op for c in plan.choices)
