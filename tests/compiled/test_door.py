"""``gistkit.compile`` and the backend ``gistkit``, with Inductor: bits, records, caches, what is refused."""

import re
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import gistkit
from gistkit.compiled import backend
from tests.support.compiled_cases import assert_same, loss_of, step

pytestmark = pytest.mark.usefixtures("fresh")
ROWS = 4
X, Y = torch.randn(ROWS, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.arange(ROWS)


class Halves(nn.Module):
    """Two halves with a graph break between them."""

    def __init__(self, whole=True):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.second, self.whole = nn.Linear(512, 10), whole

    def forward(self, x):
        y = self.first(x)
        if not self.whole:
            torch._dynamo.graph_break()
        return self.second(y.flatten(1))


def network(whole=True):
    torch.manual_seed(5)
    return Halves(whole)


@pytest.fixture(scope="module")
def plain():
    """The loss and gradients under torch.compile."""
    torch.use_deterministic_algorithms(True)
    return step(torch.compile(network(), fullgraph=True), X, Y, loss_of)


def test_a_training_step_has_the_same_bits_and_a_report(plain):
    model = network()
    compiled = gistkit.compile(model, fullgraph=True)
    assert "no training step" in str(gistkit.report(compiled))
    for _ in range(2):  # the second call runs the same graph
        assert_same(plain, step(compiled, X, Y, loss_of))
    report = gistkit.report(compiled)
    assert len(report.graphs) == 1 and report.kept_bytes < report.plain_bytes == gistkit.report(model).plain_bytes
    assert {"mask1", "map4", "dense"} == {row.form for row in report.rows}
    text = str(report)
    assert "a max-pool's window of 4 positions" in text and f"{report.ratio:.2f}x" in text
    with torch.no_grad():
        logits = compiled.eval()(X)
    assert torch.allclose(logits, model(X), atol=1e-5) and gistkit.report(compiled).graphs == report.graphs


def test_caches_stay_valid_and_the_report_with_them(plain):
    assert_same(plain, step(gistkit.compile(network(), fullgraph=True), X, Y, loss_of))
    torch._dynamo.reset()
    counters.clear()
    compiled = gistkit.compile(network(), fullgraph=True)
    assert_same(plain, step(compiled, X, Y, loss_of))
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert gistkit.report(compiled).kept_bytes < gistkit.report(compiled).plain_bytes


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # PyTorch's own, at a graph break
def test_graph_breaks_and_two_models(plain):
    one, two = network(whole=False), network()
    assert_same(plain, step(gistkit.compile(one), X, Y, loss_of))
    assert_same(plain, step(torch.compile(two, backend=backend, options={"fidelity": "bitwise"}), X, Y, loss_of))
    assert len(gistkit.report(one).graphs) == 2 and len(gistkit.report(two).graphs) == 1


def test_the_entry_point_is_the_backend():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split('[project.entry-points."torch_dynamo_backends"]')[1]
    named = EntryPoint("gistkit", re.search(r'gistkit = "(.+)"', section)[1], "torch_dynamo_backends")
    assert named.load() is backend


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        ({"lossy": "fp9"}, ValueError, "lossy must be None or one of fp16"),
        ({"fidelity": "exact"}, ValueError, "fidelity must be one of bitwise, reassociated, got 'exact'"),
        ({"budget": "12 apples"}, ValueError, "budget must be"),
        ({"backend": "eager"}, TypeError, "backend must be left out, got 'eager'"),
        ({"plan": 3}, TypeError, "plan must be a gistkit.Plan or None, got int"),
    ],
)
def test_words_that_mean_nothing(words, error, text):
    with pytest.raises(error, match=re.escape(text)):
        gistkit.compile(network(), **words)


def test_what_graphs_cannot_do_of_a_plan_is_named(plain):
    plan = gistkit.plan(network(), X, loss_fn=lambda y: y.sum())
    dense = [d for d in plan.decisions if d.stays]

    def with_all(**words):
        return replace(plan, decisions=tuple(replace(d, **words) if d in dense else d for d in plan.decisions))

    model = network()
    assert_same(plain, step(gistkit.compile(model, plan=with_all(codec="zvc")), X, Y, loss_of))
    (note,) = gistkit.report(model).notes
    assert note.endswith(", ".join(f"storage {d.storage} (zvc)" for d in dense)) and dense
    text = ", ".join(f"storage {d.storage} (dense)" for d in dense) + " on the host"
    with pytest.raises(gistkit.CompileError, match=re.escape(text)):
        gistkit.compile(model, plan=with_all(place="host"))


def test_torch_compile_takes_a_compressed_model(plain):
    model = gistkit.compress(network())
    compiled = torch.compile(nn.Sequential(model), fullgraph=True)
    assert_same(plain, step(compiled, X, Y, loss_of))
    report = gistkit.report(model)
    assert {"mask1", "map4", "dense"} == {row.form for row in report.rows} and report.kept_bytes < report.plain_bytes
    assert len(report.graphs) == 1
    before = gistkit.compiled.door.settings_in_force()
    assert before is None  # outside of a compilation
    assert_same(plain, step(torch.compile(network()), X, Y, loss_of))  # a plain model is cut as before


def test_compressed_models_in_one_graph_agree_on_settings():
    parts = gistkit.compress(nn.Linear(4, 4)), gistkit.compress(nn.Linear(4, 4), lossy="fp8")
    with pytest.raises(Exception, match="must have the same settings"):
        torch.compile(nn.Sequential(*parts), fullgraph=True)(torch.randn(2, 4))


def test_a_plan_runs_eagerly_under_torch_compile():
    plan = gistkit.plan(network(), X, loss_fn=lambda y: y.sum())
    with pytest.raises(torch._dynamo.exc.Unsupported, match="runs this model's forward eagerly"):
        torch.compile(gistkit.compress(network(), plan), fullgraph=True)(X)


def test_gistkit_compile_refuses_a_compressed_model():
    with pytest.raises(gistkit.CompileError, match="must not be compressed"):
        gistkit.compile(gistkit.compress(network()))


def test_what_was_never_compiled_has_no_report():
    with pytest.raises(gistkit.CompressError, match="not compressed"):
        gistkit.report(network())


def test_another_release_of_torch_is_named():
    from gistkit.compiled import compat

    with pytest.raises(gistkit.CompileError, match=r"torch 2.11 to 2.13; torch .* has none; install"):
        compat.private("torch._inductor.config", "no_such_name")
    assert "torch._inductor" in sys.modules
