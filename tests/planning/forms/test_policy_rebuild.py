"""The Gist policy: ReLU outputs that follow from what batch norm keeps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gistkit import formats
from gistkit.planning.policies.gist_rules import gist
from tests.support.graphs import N, Residual, captured, conv, decision, decisions, output_of, the


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
