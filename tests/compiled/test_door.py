"""``gistkit.compile`` and the backend ``gistkit``, with Inductor: bits, records, caches, what is refused."""

import re
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import gistkit
from gistkit.compiled import backend, compat, fusion
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


def test_what_a_sum_reads_is_decoded_apart_from_it():
    """In one loop with the decoder of a mask a CPU sums one by one, not by vectors: an attention with dropout."""
    model, x = nn.Linear(64, 192), torch.randn(2, 64, 64)

    def loss(model, x, _):
        torch.manual_seed(0)
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in model(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).square().mean()

    plain = step(model, x, None, torch.compile(loss))
    assert_same(plain, step(model, x, None, gistkit.compile(loss)))
    assert "mask1" in {row.form for row in gistkit.report(model).rows}


class Tokens(nn.Module):
    """Images to rows, as a speech encoder's: mask and norm lie in another order than what the convolution makes."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv1d(16, 64, 3, padding=1), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x):
        x = F.dropout(F.gelu(self.conv(x)).permute(0, 2, 1), 0.1)
        return x + self.out(self.norm(x))


class Summed(nn.Module):
    """A residual sum of a norm's output in bf16, as in Gemma, and the norm behind it."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def norm(self, x):
        return F.rms_norm(x.float(), (64,)).type_as(x)

    def forward(self, x):
        x = self.first(x.transpose(1, 2))
        x = x + self.norm(self.second(x))
        return x + self.third(self.norm(x))


class Drawn(nn.Module):
    """A library draws random numbers, as an attention with dropout does on a GPU, before the model's own dropout. Where
    less is saved Inductor needs less memory with the latter drawn first."""

    def __init__(self):
        super().__init__()
        self.noisy, self.first = nn.Linear(16, 16), nn.Linear(16, 16)
        self.wide, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        x = x.transpose(1, 2)
        y = F.relu(self.noisy(x))
        return F.dropout(self.first(torch.poisson(y) * y), 0.1) + self.second(F.gelu(self.wide(x)))


@pytest.mark.parametrize(
    ("made", "width", "dtype", "least"),
    [(Tokens, 16, torch.float32, 1.2), (Summed, 64, torch.bfloat16, 1), (Drawn, 16, torch.float32, 1)],
)
def test_a_cpus_code_has_the_same_bits(made, width, dtype, least):
    torch.manual_seed(0)
    model, x = made().to(dtype), torch.randn(4, width, 256, dtype=dtype)

    def loss(model, x, _):
        torch.manual_seed(0)
        return model(x).float().square().mean()

    plain = step(torch.compile(model), x, None, loss)
    assert_same(plain, step(gistkit.compile(model), x, None, loss))
    assert gistkit.report(model).ratio >= least
    assert ("drop other elements" in str(gistkit.report(model))) == (made is Drawn)


@pytest.mark.parametrize(("share", "before", "told"), [(0.1, True, True), (0.1, False, False), (0.0, True, False)])
def test_a_dropout_behind_an_attention_that_draws_is_told(share, before, told):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    if before:
        graph.call_function(torch.ops.aten._scaled_dot_product_flash_attention.default, (x, x, x, share))
    graph.call_function(torch.ops.prims.inductor_seeds.default, (2, torch.device("cpu")))
    graph.call_function(torch.ops.aten._scaled_dot_product_flash_attention.default, (x, x, x), {"dropout_p": 0.1})
    assert bool(fusion.other_draws(graph)) == told


class Written:
    """A kernel of Inductor's: its buffers, those that it reads, and the last place of what was fused to it."""

    node = None

    def __init__(self, names, reads, max_order):
        self.names, self.max_order = set(names.split()), max_order
        self.unmet_dependencies = [SimpleNamespace(name=name) for name in reads.split()]

    def get_buffer_names(self):
        return self.names


def test_under_a_budget_a_kernel_runs_where_the_last_of_those_in_it_would():
    # a Llama's: gradients of two norms are one kernel, which Inductor runs, with all that it waits for, ahead of the
    # product that frees the logits
    kernels = [
        Written("logits", "", 1), Written("gated", "logits", 20), Written("norms norm", "gated", 33),
        Written("cast", "norm", 5), Written("product", "logits", 13), Written("last", "norms", 34),
    ]  # fmt: skip
    order = [sorted(kernel.names)[-1] for kernel in fusion.join_late(kernels)]
    assert order == ["logits", "product", "gated", "norms", "cast", "last"]


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


@pytest.mark.parametrize(("words", "reuse"), [({}, None), ({"budget": "60%"}, False)])
def test_under_a_budget_inductor_keeps_no_freed_buffer(monkeypatch, words, reuse):
    """Else the peak may be above the predicted one; the caller's own word counts, but for the partitioner."""
    from gistkit.compiled.custom import Partitioner

    asked = []

    def inductor(mode, options, dynamic):
        asked.append(options)
        return lambda graph, inputs: graph.forward

    monkeypatch.setattr(torch, "_TorchCompileInductorWrapper", inductor)
    for options in ({}, {"allow_buffer_reuse": True, "custom_partitioner_fn": None}):
        torch._dynamo.reset()
        gistkit.compile(network(), options=options, **words)(X)
    assert asked[0].get("allow_buffer_reuse") is reuse and asked[1]["allow_buffer_reuse"]
    assert all(isinstance(each["custom_partitioner_fn"], Partitioner) for each in asked)


def test_gistkit_compile_refuses_a_compressed_model():
    with pytest.raises(gistkit.CompileError, match="must not be compressed"):
        gistkit.compile(gistkit.compress(network()))


def test_what_was_never_compiled_has_no_report():
    with pytest.raises(gistkit.CompressError, match="not compressed"):
        gistkit.report(network())


def test_another_release_of_torch_is_named():
    with pytest.raises(gistkit.CompileError, match=r"torch 2.11 to 2.13; torch .* has none; install"):
        compat.private("torch._inductor.config", "no_such_name")
    assert "torch._inductor" in sys.modules
