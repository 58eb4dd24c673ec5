"""gistkit.fidelity: the harmful stash is named first, exact ones bring no error, nothing of the caller's changes."""

import json
from math import hypot

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from tests.support.training import unchanged


class Binades(nn.Module):
    """Scales channel i by 2**(-5 i): values over many binades, of which a narrow float keeps few."""

    def forward(self, x):
        return x * torch.exp2(-5.0 * torch.arange(x.shape[1], device=x.device)).view(1, -1, 1, 1)


def chain(bad):
    layers = [nn.Conv2d(3, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 8, 3), nn.Tanh(), Binades() if bad else nn.Identity()]
    return nn.Sequential(
        *layers, nn.Conv2d(8, 8, 3), nn.Sigmoid(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )


def data(size=16):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 3, size, size, generator=generator), torch.arange(4)


def test_the_planted_layer_is_named_first():
    x, y = data(32)
    found = gistkit.fidelity(chain(True), x, y, lossy="fp8", loss_fn=F.cross_entropy)
    first, second = found.rows[:2]
    assert first.module == "4", str(found)
    assert first.error.relative > second.error.relative and first.error.cosine < 1
    assert found.repeat.relative == 0
    # errors of different stashes are near independent, so their squares add: 0.9999 to 1.0029 times that was measured
    assert found.together.relative == pytest.approx(hypot(*(r.error.relative for r in found.rows)), rel=0.01)
    assert first.bits == 8 and first.form in str(found)


def test_formats_are_ordered_by_their_bits():
    x, y = data()
    errors = [gistkit.fidelity(chain(False), x, y, lossy=f, loss_fn=F.cross_entropy).together.relative
              for f in ("fp16", "fp10", "fp8") if torch.manual_seed(0)]  # fmt: skip
    assert 0 < errors[0] < errors[1] < errors[2] < 1


def test_nothing_of_the_callers_changes():
    model, (x, y) = chain(True), data()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with unchanged(model):
        gistkit.fidelity(model, x, y, loss_fn=F.cross_entropy)
    assert not hasattr(model.forward, "engine")


def test_a_plan_and_its_figures(tmp_path):
    model, (x, y) = chain(True), data()
    plan = gistkit.plan(model, x, y, loss_fn=F.cross_entropy, policy="gist", lossy="fp16s")
    found = gistkit.fidelity(model, x, y, lossy=plan, loss_fn=F.cross_entropy)
    assert {r.storage for r in found.rows} == {d.storage for d in plan.decisions if d.form.rounds_to}
    read = json.loads(found.to_json())
    assert [r["storage"] for r in read["rows"]] == [r.storage for r in found.rows]
    assert set(found.rows[0].layers) == {"0", "2", "5", "9"} and found.rows[0].worst_layer in found.rows[0].layers
    found.plot(tmp_path / "errors.png")
    assert (tmp_path / "errors.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        ({"lossy": "fp7"}, ValueError, "fp7"),
        ({"lossy": 8}, TypeError, "lossy must be a format or a gistkit.Plan, got int"),
        ({"lossy": "plan"}, gistkit.PlanError, "must round something, got one of policy 'plain'"),
    ],
)
def test_bad_arguments(words, error, text):
    model, (x, y) = chain(False), data()
    if words["lossy"] == "plan":
        words = {"lossy": gistkit.plan(model, x, y, loss_fn=F.cross_entropy, policy="plain")}
    with pytest.raises(error, match=text):
        gistkit.fidelity(model, x, y, loss_fn=F.cross_entropy, **words)
