"""gistkit.plan: arguments, models and batches that are refused, by the text."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.planning.choose import remedy
from tests.support.graphs import Apply
from tests.support.planning_cases import T, X, net


@pytest.mark.parametrize(
    ("words", "kind", "text"),
    [
        ({"budget": "lots"}, ValueError, r"budget must be .*, got 'lots'; write a number and a unit"),
        ({"budget": 1.5}, TypeError, r"budget must be .*, got float 1.5"),
        ({"budget": 10**5000}, ValueError, r"budget must be .*, got int too long to be shown; check the number"),
        ({"reserved_bytes": "10%"}, ValueError, r"reserved_bytes must be .*, got '10%': a share of what"),
        (
            {"policy": "optimum"},
            ValueError,
            r"policy must be one of plain, .*, got 'optimum'; did you mean 'optimal'\?",
        ),
        ({"fidelity": "exact"}, ValueError, r"fidelity must be one of bitwise, reassociated, lossy, got 'exact'"),
        ({"fidelity": "lossy"}, ValueError, r'fidelity="lossy" needs a format, got lossy=None; pass lossy="fp16"'),
        ({"lossy": "fp7"}, ValueError, r'lossy must be None or one of fp16, .*; got lossy="fp7"'),
        (
            {"lossy": "fp8", "policy": "vdnn-all"},
            ValueError,
            r"lossy must be None for policy=\"vdnn-all\", which rounds nothing, got 'fp8'; leave it out, or take gist",
        ),
        ({"hardware": "h20"}, ValueError, r"hardware must be one of titanx, .* did you mean 'h200'\?"),
        ({"hardware": "cuda"}, ValueError, r"hardware must be .*, got 'cuda'; leave it out for the device at hand$"),
        ({"hardware": 3}, TypeError, r"hardware must be a preset's name"),
        ({"density": 1.5}, ValueError, r"density must be a share of elements from 0 to 1 .*, got 1.5; leave it out"),
        ({"per_sub_batch_norm": "yes"}, TypeError, r"plan: per_sub_batch_norm must be True or False, got 'yes'; False"),
        ({"batch_statistics": "per_sub_batch"}, TypeError, r"batch_statistics= .*; write per_sub_batch_norm=True"),
        ({"loss_fn": "mse"}, TypeError, r"plan: loss_fn must be callable, got str"),
    ],
)
def test_wrong_arguments(words, kind, text):
    with pytest.raises(kind, match=text):
        gistkit.plan(net(), X, T, **{"loss_fn": F.cross_entropy, **words})


def test_wrong_models_and_batches():
    with pytest.raises(TypeError, match=r"plan: model must be a torch.nn.Module, got Tensor; pass the module itself"):
        gistkit.plan(X, net())
    text = r"plan: batch must hold the model's inputs, got no tensor; pass them after the"
    with pytest.raises(ValueError, match=text):
        gistkit.plan(net(), budget="1GiB")
    text = r"plan: hardware must be given for a model on device 'meta', .*pass hardware='h200'"
    with pytest.raises(ValueError, match=text):
        gistkit.plan(net().to("meta"), X)
    with pytest.raises(gistkit.CaptureError, match="could not be captured"):
        gistkit.plan(net(), X[:, :2], T, loss_fn=F.cross_entropy)


@pytest.mark.parametrize(("kind", "hardware"), [(nn.LSTM, "cpu"), (nn.GRU, "h200")])
def test_bytes_that_only_a_library_knows_are_no_budget(kind, hardware):
    """PyTorch's fake LSTM has a workspace of 0 bytes, where the real one keeps several times its output."""
    model, x = Apply(lambda m, x: m[0](x.relu())[0], kind(8, 8)), torch.randn(5, 3, 8)
    with pytest.raises(gistkit.CaptureError, match=r"how many \w+ of 'parts.0' \(call \d\) keeps .* without a budget"):
        gistkit.plan(model, x, budget="90%", hardware=hardware)
    assert gistkit.plan(model, x, hardware=hardware).peak_bytes
    if kind is nn.GRU:
        assert gistkit.plan(model, x, budget="100%", hardware="cpu").peak_bytes, "of PyTorch's own on the CPU"


@pytest.mark.parametrize("policy", ["gist", "modnn"])
def test_whatever_the_policy_a_refusal_tells_what_every_class_needs(policy):
    asked = {"loss_fn": F.cross_entropy, "hardware": "titanx", "policy": policy}
    with pytest.raises(gistkit.BudgetError) as refused:
        gistkit.plan(net(), X, T, budget="1kB", **asked)
    least = refused.value.least_bytes
    assert list(least) == ["bitwise", "reassociated", "lossy"]
    own = policy if policy == "modnn" else "optimal"  # it has bounds of its own
    plan = gistkit.plan(net(), X, T, budget=least["bitwise"], **{**asked, "policy": own})
    assert plan.policy == own and plan.peak_bytes <= least["bitwise"]
    assert 'with policy="optimal" no class of moves would do' in str(refused.value) or policy == "optimal"


def test_a_refusal_names_the_bytes_of_the_class_that_was_asked_for():
    least = {"bitwise": 300, "reassociated": 200, "lossy": 100}
    texts = {"bitwise": "", "reassociated": ", for reassociated moves,", "lossy": ", for lossy moves,"}
    for asked, text in texts.items():
        assert f"raise the budget to {least[asked]} bytes{text} or take" in remedy(50, least, asked, "fp8")


@pytest.mark.parametrize("call", [gistkit.plan, gistkit.profile])
def test_a_batch_without_rows_is_refused(call):
    text = r"(plan|profile): batch must hold at least one row, got a tensor of shape \(0, 3, 32, 32\); pass a batch"
    with pytest.raises(ValueError, match=text):
        call(net(), X[:0], T[:0], loss_fn=F.cross_entropy)
