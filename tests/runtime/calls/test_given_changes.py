"""The short way under a plan of the caller's, of models that are changed, watched or used otherwise between steps: what
the long way does and refuses, the short way does and refuses; and calls are counted alike."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gistkit
from tests.support.call_cases import Net, image
from tests.support.given_cases import ANEW, Mixed, agree, by_hand, held_off, pair, step

BUDGETS = ["gist, tight", "75 %"]
pytestmark = pytest.mark.filterwarnings("ignore::gistkit.errors.BudgetWarning")


def settled(plan, make=Net, steps=3):
    models = pair(plan, make)
    for seed in range(steps):
        agree(*models, image(seed=seed))
    return models


def _strided(model):
    model.convs[2].padding, model.convs[2].dilation = (2, 2), (2, 2)


def _larger(model):
    model.convs[2].register_forward_pre_hook(lambda m, args: (F.pad(args[0], (1, 1, 1, 1)),))


def _in_place(model):
    model.relu.inplace = False


def _in_place_later(model):
    model.relu.inplace = True
    model.convs[1].register_forward_pre_hook(lambda m, args: setattr(model.relu, "inplace", False))


def _evaluated(model):
    model.norms[0].eval()


def _frozen(model):
    model.convs[1].weight.requires_grad_(False)


def _extra(model):
    model.convs[1].register_forward_hook(lambda m, args, y: y * 1)


def _doubled(model):
    model.norms[1].register_forward_hook(lambda m, args, y: torch.relu(y))


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize("change", [_strided, _larger, _in_place, _in_place_later, _evaluated, _frozen, _doubled])
def test_another_step_is_refused_under_a_budget(name, change):
    """In the same words, whichever way the steps before it went."""
    said = []
    for model in settled(name):
        change(model)
        with pytest.raises((gistkit.PlanMismatchError, gistkit.PlanError)) as refused:
            model(image())
        said.append(str(refused.value))
    assert said[0] == said[1]


def outcome(model, x):
    try:
        return step(model, x)[1:]
    except (gistkit.PlanMismatchError, gistkit.PlanError) as error:
        return str(error)


@pytest.mark.parametrize("name", ["open", "gist", "all anew", "75 %"])
@pytest.mark.parametrize("change", [_extra, _strided, _in_place, _frozen, _evaluated])
def test_a_changed_step_is_the_same_or_refused_alike(name, change):
    short, long = settled(name)
    for model in (short, long):
        change(model)
    for seed in (5, 6):
        held_off(long)
        assert outcome(short, image(seed=seed)) == outcome(long, image(seed=seed))


@pytest.mark.parametrize("name", ["open", "all anew", "75 %"])
def test_hooks_of_modules_run(name):
    seen = []
    models = settled(name)
    for model in models:
        model.first.register_forward_hook(lambda m, args, y: seen.append(y.shape))
        model.relu.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape))
        if name == "open":  # its views are calls, which no segment was planned with
            model.convs[1].register_full_backward_hook(lambda m, grad_in, grad_out: (grad_in[0] * 2,))
    for seed in (5, 6):
        agree(*models, image(seed=seed))
    assert len(seen) == 4 * 6


class Checkpointed(nn.Module):
    """A checkpoint between layers that are not."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), nn.Linear(8, 5)
        self.inner = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.after = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x):
        x = checkpoint(self.inner, self.stem(x), use_reentrant=False)
        return self.head(self.after(x).mean((2, 3)))


@pytest.mark.parametrize("make", [Mixed, Checkpointed])
@pytest.mark.parametrize("forms", [{}, {"relu": ANEW}, {"conv2d": ANEW}, {"relu": ("zvc", "device")}])
def test_modules_beside_functions_and_checkpoints(make, forms):
    settled(by_hand(make, **forms), make, steps=4)
