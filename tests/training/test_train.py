"""The training comparison: what is equal, what is counted, and that a single wrong bit is found."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import gistkit
from gistkit.errors import ModelError
from gistkit.ir import Plan
from gistkit.runtime.live import LiveBytes
from gistkit.training import Comparison, RunResult, TrainResult, TrainSettings, batches, loop, open_images
from gistkit.training.loop import share_of_rate

TINY = TrainSettings("tests.training.test_train:tiny", steps=4, batch=8)


def tiny(num_classes):
    """A network that takes milliseconds: conv, ReLU, pool, dropout, linear."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(4), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(), nn.Linear(128, num_classes),
    )  # fmt: skip


def maps():
    """A label for every pixel."""
    return nn.Conv2d(3, 10, 3, padding=1)


def few():
    """Four classes, whatever is asked for."""
    return tiny(4)


def frozen(num_classes):
    """Nothing to train."""
    return tiny(num_classes).requires_grad_(False)


def train(settings):
    return Comparison(settings).run()


class Nudged(nn.Module):
    """The model, its first score 2**-14 higher from the third training forward on."""

    def __init__(self, model):
        super().__init__()
        self.model, self.forwards = model, 0

    def forward(self, x):
        scores = self.model(x)
        self.forwards += self.training
        if self.forwards < 3:
            return scores
        return scores + torch.zeros_like(scores).index_fill(1, torch.tensor([0]), 2**-14)


def nudge(model, lossy=None):
    return model if lossy else Nudged(model)


@pytest.fixture(scope="module")
def result():
    return train(TINY)


def test_lossless_equals_plain_and_keeps_less(result):
    plain, lossless, fp8 = result.runs
    assert [run.name for run in result.runs] == ["plain", "lossless", "fp8"]
    assert result.first_difference is None and len(plain.losses) == 4 and plain.losses == lossless.losses
    assert fp8.losses != plain.losses and fp8.losses[0] == pytest.approx(plain.losses[0], rel=1e-2)
    assert fp8.kept_bytes < lossless.kept_bytes < plain.kept_bytes
    assert lossless.peak_bytes < plain.peak_bytes
    assert all(run.step_s > 0 and run.device_peak_bytes is None for run in result.runs)
    assert result.tested == "360 test images (every fifth digit)"
    assert plain.accuracy == lossless.accuracy and fp8.accuracy is not None and 0 <= fp8.accuracy <= 1


def test_a_plain_run_is_an_ordinary_training_loop(result):
    plain = result.runs[0]
    torch.manual_seed(TINY.seed)
    model = tiny(10)
    torch.manual_seed(TINY.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=TINY.momentum, nesterov=True)
    losses = []
    for step, (x, y) in enumerate(batches(open_images("digits", 32)[0], 8, 4, seed=TINY.seed)):
        optimizer.param_groups[0]["lr"] = TINY.lr * share_of_rate(step, 4)
        optimizer.zero_grad()
        with LiveBytes() as live:
            loss = nn.functional.cross_entropy(model(x), y)
            kept_bytes = live.current_bytes
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert plain.losses == tuple(losses) and plain.kept_bytes == kept_bytes


def test_the_learning_rate_rises_for_a_tenth_of_the_steps_and_falls_along_a_cosine():
    shares = [share_of_rate(step, 100) for step in range(100)]
    assert shares[:3] == pytest.approx([0.1, 0.2, 0.3]) and shares[50] == pytest.approx(0.5)
    assert max(shares) == shares[9] > 0.97 and shares[9:] == sorted(shares[9:], reverse=True) and shares[-1] < 0.001


def test_a_wrong_step_is_found(monkeypatch):
    monkeypatch.setattr(loop, "compress", nudge)
    result = train(replace(TINY, lossy=None))
    plain, lossless = result.runs[:2]
    assert result.first_difference == 2 and abs(plain.losses[2] - lossless.losses[2]) < 2**-14
    assert json.loads(result.to_json())["first_difference"] == 2


def result_of(*losses):
    runs = (RunResult(name, 1, 1, None, 1.0, values, None, ()) for name, values in zip("ab", losses, strict=True))
    return TrainResult(TINY, {}, None, tuple(runs))


def test_equality_is_of_bits():
    nan = float("nan")
    assert result_of((1.0, nan, 3.0), (1.0, nan, 3.0)).first_difference is None
    assert result_of((1.0, 0.0), (1.0, -0.0)).first_difference == 1
    assert result_of((1.0,), (math.nextafter(1.0, 2.0),)).first_difference == 0


def test_json_is_strict_and_has_every_bit(result):
    raw = json.loads(result.to_json(), parse_constant=pytest.fail)
    assert [tuple(run["losses"]) for run in raw["runs"]] == [run.losses for run in result.runs]
    assert raw["settings"]["model"] == TINY.model and raw["environment"]["torch"] == torch.__version__
    assert raw["environment"]["gistkit"] == gistkit.__version__
    assert [run["name"] for run in raw["runs"]] == ["plain", "lossless", "fp8"]
    assert {"op", "bytes"} & set(raw["runs"][0]) == set() and raw["runs"][0]["memory"][0][1] > 0
    odd = json.loads(result_of((math.inf, 0.1), (math.inf, 0.1)).to_json(), parse_constant=pytest.fail)
    assert odd["runs"][0]["losses"] == [None, 0.1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("maps", r"must return class scores, for 8 images of 10 classes a tensor of shape \(8, 10\), got \(8, 10, 32"),
        ("few", r"of shape \(8, 10\), got \(8, 4\); give a factory whose network does, it is given num_classes"),
        ("frozen", "the model's scores must need a gradient, and no parameter leads to them; train at least one"),
    ],
)
def test_networks_that_cannot_be_trained_on_labels(name, text):
    with pytest.raises(ModelError, match=text):
        train(replace(TINY, model=f"tests.training.test_train:{name}"))


@pytest.mark.parametrize("words", [{"budget": "97%"}, {"policy": "gist"}])
def test_a_plan_in_place_of_lossless_and_lossy(words):
    result = train(replace(TINY, **words))
    plain, planned = result.runs
    assert result.plan is not None and planned.name == result.plan.policy == words.get("policy", "optimal")
    assert result.first_difference is None and planned.backward_s <= planned.step_s and plain.backward_s is None
    parameters = sum(p.nbytes for p in tiny(10).parameters())
    assert result.plan.contract.reserved_bytes == 2 * parameters
    read = json.loads(result.to_json())
    assert read["step_s"] == planned.backward_s and Plan.from_json(json.dumps(read["plan"])) == result.plan


def test_a_plan_in_sub_batches_is_carried_out():
    result = train(replace(TINY, policy="modnn", budget="70%", fidelity="reassociated"))
    assert result.plan.sub_batches > 1
    assert result.runs[1].peak_bytes < result.runs[0].peak_bytes
    assert all(abs(a - b) < 1e-5 for a, b in zip(*(run.losses for run in result.runs), strict=True))


def test_plain_pytorch_may_find_no_room(monkeypatch):
    def no_room(*args):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(loop, "class_loss", no_room)
    monkeypatch.setattr(Comparison, "names", ("plain",))
    assert train(replace(TINY, policy="gist")).runs == ()
    with pytest.raises(torch.OutOfMemoryError):
        train(TINY)


def test_a_budget_that_cannot_be_kept_is_refused_before_training():
    with pytest.raises(gistkit.BudgetError, match="the budget must be at least what the step needs"):
        Comparison(replace(TINY, budget="1KiB"))
