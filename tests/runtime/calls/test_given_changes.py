"""The short way under a plan of the caller's, of models that are changed, watched or used otherwise between steps: what
the long way does and refuses, the short way does and refuses; and calls are counted alike."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gistkit
from gistkit.runtime.recompute import tape as recompute_tape
from tests.support.call_cases import Net, image
from tests.support.given_cases import ANEW, LABELS, Mixed, agree, by_hand, held_off, network, pair, planned, step
from tests.support.nn_cases import same_bits

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


@pytest.mark.parametrize("name", BUDGETS)
def test_a_larger_input_is_refused_under_a_budget(name):
    model, _ = settled(name)
    with pytest.raises(gistkit.PlanMismatchError, match="at most"):
        model(image(size=20))
    with pytest.raises(gistkit.PlanMismatchError, match="at most 4 rows"):
        model(image(5))


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


@pytest.mark.parametrize("name", ["open", "gist, tight", "all anew", "75 %"])
def test_a_graph_that_is_retained(name):
    results = []
    for model in settled(name):
        loss = F.cross_entropy(model(image()), LABELS)
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        results.append([*first, *torch.autograd.grad(loss, list(model.parameters()))])
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    half = len(results[0]) // 2
    assert all(torch.equal(a, b) for a, b in zip(results[0][:half], results[0][half:], strict=True))


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


@pytest.mark.parametrize("budget", ["90%", "85%"])
def test_a_checkpoint_under_a_budget(budget):
    settled(planned(Checkpointed, budget=budget, hardware="cpu"), Checkpointed, steps=4)


@pytest.mark.parametrize(
    "make, forms", [(Mixed, {"conv2d": ANEW}), (Net, {"relu": ANEW}), (Checkpointed, {"relu": ANEW})]
)
def test_every_call_is_counted(make, forms, monkeypatch):
    """The tape's count of a step's calls ends where that of the captured forward does."""
    ends, close = [], recompute_tape.Tape.close
    monkeypatch.setattr(recompute_tape.Tape, "close", lambda tape: (ends.append(_left(tape)), close(tape)))
    model, _ = pair(by_hand(make, **forms), make)
    for seed in range(4):
        step(model, image(seed=seed))
    assert ends == [0] * 4


def _left(tape):
    return len(tape._plan.order) - tape._at


def test_threads_side_by_side():
    """Whose forwards meet modules of a class that is there for the time of another's."""
    model, plain = settled("75 %")[0], network()
    plain.load_state_dict(model.state_dict())
    want, wrong = {n: torch.autograd.grad(plain(image(n)).sum(), plain.convs[1].weight)[0] for n in (2, 4)}, []

    def work(rows):
        for _ in range(5):
            got = torch.autograd.grad(model(image(rows)).sum(), model.convs[1].weight)[0]
            wrong.append(not same_bits(got, want[rows]))

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (2, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 10 and not any(wrong) and len(model.forward.engine._programs) == 1
