"""lossy="auto": formats by storage whose measured error keeps the bound, in fewer bytes than one format for all."""

import copy
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.planning import Choice
from gistkit.runtime import compressed_forward
from gistkit.runtime.assign import _within
from tests.support.graphs import Apply
from tests.support.tensors import same_bits

FORMATS = ("fp16", "fp8s", "int4s", "int2s")


def chain():
    first = [nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh()]
    last = [nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*first, *last)


def batch():
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(4)


def error_of(model, x, y, plan):
    """The relative error of all gradients in a step under a plan, as the model is compressed."""
    exact, found = copy.deepcopy(model), gistkit.compress(copy.deepcopy(model), plan)
    for each in (exact, found):
        F.cross_entropy(each(x), y).backward()
    pairs = [(a.grad.double(), b.grad.double()) for a, b in zip(exact.parameters(), found.parameters(), strict=True)]
    return (sum((a - b).square().sum() for a, b in pairs) / sum(a.square().sum() for a, _ in pairs)).sqrt().item()


class Correlated:
    """Stands for a step where the errors of stashes add as they are, and not in variance."""

    ERRORS = {"fp8s": 0.01, "int4s": 0.03, "int2s": 0.2}  # noqa: RUF012

    def __init__(self, factor):
        self.factor, self.steps = factor, 0

    def error(self, formats):
        self.steps += 1
        return self.factor * sum(self.ERRORS[name] for name in formats.values())


@pytest.mark.parametrize(("factor", "rounded"), [(0.5, 5), (1.0, 5), (1.6, 2), (1e9, 0)])
def test_too_hopeful_a_model_is_tightened_and_then_given_up(factor, rounded):
    lab = Correlated(factor)
    group = {"": Choice(0.0, 0)} | {
        f: Choice(lab.ERRORS[f], -n) for f, n in (("fp8s", 24), ("int4s", 28), ("int2s", 30))
    }
    formats, expected = _within(lab, dict.fromkeys(range(5), group), 0.05)
    assert len(formats) == rounded and lab.error(formats) <= 0.05 and expected <= 0.05 and 2 <= lab.steps <= 7


def test_the_bound_is_kept_in_fewer_bytes_than_any_one_format():
    model, (x, y) = chain(), batch()
    words = {"loss_fn": F.cross_entropy, "policy": "gist"}
    plan = gistkit.plan(model, x, y, lossy="auto", max_error=0.01, **words)
    auto = plan.details["auto"]
    assert error_of(model, x, y, plan) == pytest.approx(auto["measured_error"], rel=1e-9)
    assert auto["measured_error"] <= 0.01
    assert {str(d.storage): d.form.rounds_to for d in plan.decisions if d.form.rounds_to} == auto["formats"]
    assert plan.contract.lossy == plan.details["lossy"] == "auto" and gistkit.Plan.from_json(plan.to_json()) == plan
    assert auto["kept_bytes"] == plan.kept_bytes < auto["exact_bytes"]
    assert auto["steps"] <= 4 * len(auto["formats"]) + 11
    whole = [gistkit.plan(model, x, y, lossy=f, **words) for f in FORMATS]
    fits = [p.kept_bytes for p in whole if error_of(model, x, y, p) <= 0.01]
    assert fits and plan.kept_bytes <= min(fits)


def test_a_budget_takes_exact_forms_or_the_assigned_ones():
    model, (x, y) = chain(), batch()
    words = {"loss_fn": F.cross_entropy, "lossy": "auto"}
    free = gistkit.plan(model, x, y, policy="gist", **words)
    with pytest.raises(gistkit.BudgetError) as refused:
        gistkit.plan(model, x, y, budget=1000, **words)
    least = refused.value.least_bytes
    assert least["lossy"] < least["bitwise"]
    tight = gistkit.plan(model, x, y, budget=least["lossy"], **words)
    formats = tight.details["auto"]["formats"]
    assert tight.fidelity == "lossy" and formats == free.details["auto"]["formats"]
    assert all(formats[str(d.storage)] == d.form.rounds_to for d in tight.decisions if d.form.rounds_to)
    gistkit.compress(copy.deepcopy(model), tight)(x[: tight.planned_rows]).sum().backward()


def test_a_plan_of_several_formats_is_carried_out_as_it_is():
    model, (x, y) = chain(), batch()
    plan = gistkit.plan(model, x, y, policy="gist", loss_fn=F.cross_entropy, lossy="auto")
    assert len(set(plan.details["auto"]["formats"].values())) > 1
    with pytest.raises(ValueError, match="lossy must be None or the plan's own format 'auto', got 'fp10'"):
        gistkit.compress(model, plan, lossy="fp10")
    gistkit.compress(model, plan, lossy="auto")
    for _ in range(2):
        F.cross_entropy(model(x), y).backward()
        assert gistkit.report(model).stats.kept_bytes == plan.kept_bytes
    assert "measured, " not in str(gistkit.report(model))  # nothing is measured again


def digits():
    found = pytest.importorskip("sklearn.datasets").load_digits()
    return torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)


def tiny():
    def block(i, o):
        return nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()

    return nn.Sequential(*block(1, 8), *block(8, 16), nn.MaxPool2d(2), *block(16, 16), nn.Flatten(), nn.Linear(256, 10))


def trained(steps, **words):
    """(losses, formats) of one training, by step."""
    x, y = digits()
    torch.manual_seed(0)
    model = gistkit.compress(tiny(), **words)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, formats = [], []
    for rows in torch.randint(len(x), (steps, 64)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        formats.append(told(model))
    return losses, formats


def told(model):
    """Formats by storage of a compressed model, and how they were found."""
    (found,) = compressed_forward(model).engine._formats._found.values()
    return found[1]


def test_formats_are_measured_again_and_repeated_runs_give_the_same():
    one, two = (trained(5, lossy="auto", max_error=0.03, remeasure_every=2) for _ in range(2))
    assert one == two
    formats = one[1]
    assert [i for i in range(1, 5) if formats[i] is not formats[i - 1]] == [2, 4]
    assert formats[0].formats and 0 < formats[0].measured_error <= 0.03


class Noisy(nn.Module):
    """Draws from all random states, changes buffers, writes to its input."""

    def __init__(self):
        super().__init__()
        self.body, self.calls = tiny(), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, scale):
        self.seen += 1
        self.calls += 1
        x = F.dropout(x.mul_(scale), 0.2) + random.random() + numpy.random.rand()
        return {"scores": self.body(x), "steps": self.calls}


def test_nothing_of_the_callers_moves():
    def step(**words):
        torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
        model, before = Noisy(), nn.Conv2d(1, 1, 1)
        model.body[0].weight.grad = torch.ones_like(model.body[0].weight)
        if words:
            gistkit.compress(model, **words)
        x = before(torch.rand(16, 1, 8, 8)) * 1
        scores = model(x, scale=2.0)["scores"]
        states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
        F.cross_entropy(scores, torch.arange(16) % 10).backward()
        return model, before, x.detach(), states

    # so strict a bound leaves everything exact, so that gradients are compared to the bit
    (plain, first, x, states), (model, own_first, own_x, own_states) = step(), step(lossy="auto", max_error=1e-9)
    assert torch.equal(states[0], own_states[0]) and states[1:] == own_states[1:] and same_bits(x, own_x)
    assert plain.calls == model.calls == 1 and told(model).steps > 10 and not told(model).formats
    assert all(same_bits(a, b) for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True))
    pairs = zip([*first.parameters(), *plain.parameters()], [*own_first.parameters(), *model.parameters()], strict=True)
    assert all(same_bits(a.grad, b.grad) for a, b in pairs)


def test_a_models_own_loss_and_autocast():
    """It is returned beside what it is of."""
    body = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    own = Apply(lambda m, x: SimpleNamespace(last=(out := m[0](x)), loss=out.square().mean()), body)
    model, x = gistkit.compress(own, lossy="auto"), torch.randn(8, 32, 64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).loss
    loss.backward()
    found = told(model)
    assert len(set(found.formats.values())) > 1 and 0 < found.measured_error <= 0.05
    assert body.linear1.weight.grad.isfinite().all() and torch.is_autocast_cache_enabled()


def test_frozen_models_and_copies():
    frozen = tiny().requires_grad_(False)
    gistkit.compress(frozen, lossy="auto")
    frozen(digits()[0][:8])
    model = gistkit.compress(tiny(), lossy="auto", max_error=0.2, min_gain=0)
    twin, x = copy.deepcopy(model), digits()[0][:32]
    model(x).sum().backward(), twin(x).sum().backward()
    assert told(model) == told(twin) and told(model).max_error == 0.2
    assert 'lossy="auto": storages rounded: ' in str(gistkit.report(model))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"lossy": "auto", "max_error": 0}, "compress: max_error must be a share above 0 and below 1, .* got 0;"),
        ({"lossy": "auto", "max_error": "5%"}, "max_error must be .* got '5%';"),
        ({"lossy": "auto", "remeasure_every": 0}, "remeasure_every must be a number of forwards from 1 up, .* got 0 "),
        ({"lossy": "fp8", "remeasure_every": 5}, "remeasure_every must be .* got 5 with lossy='fp8'; leave it out"),
    ],
)
def test_bad_arguments(words, text):
    with pytest.raises(ValueError, match=text):
        gistkit.compress(tiny(), **words)


def test_where_nothing_can_be_measured_the_error_names_the_remedy():
    model, x = tiny(), torch.rand(2, 1, 8, 8)
    remedy = r'lossy="auto" measures steps of a real model, which gistkit.compress.* name a format here, such as "fp8s"'
    with pytest.raises(ValueError, match=remedy), gistkit.saving("auto"):
        pass
    with pytest.raises(ValueError, match=remedy):
        gistkit.fidelity(model, x, lossy="auto")
    with pytest.raises(ValueError, match=r'real tensors .* got one on .* name a format: lossy="fp8s"'):
        gistkit.plan(model, x.to("meta"), lossy="auto", hardware="cpu")
    with pytest.raises(ValueError, match="plan: max_error must be"):
        gistkit.plan(model, x, lossy="auto", max_error=2)
    with pytest.raises(ValueError, match='lossy must be None for policy="vdnn-all"'):
        gistkit.plan(model, x, lossy="auto", policy="vdnn-all")
    hooked = gistkit.compress(tiny(), lossy="auto")
    hooked[0].register_forward_hook(lambda *_: None)
    with pytest.raises(gistkit.CaptureError, match='lossy="auto" measures steps of this model: name a format'):
        hooked(x)
