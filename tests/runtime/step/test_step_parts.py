"""step in sub-batches: rows that depend on each other, and losses that do not add up, are refused beforehand."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from tests.support.step_parts_cases import (
    APART,
    CLASSES,
    COUPLED,
    ROWS,
    Drawn,
    Net,
    Pairs,
    contrastive,
    cross_entropy_sum,
    images,
    noisy,
    regularised,
    weighted,
)

REMEDIES = (
    'pass sub_batches=1, or plan without sub-batches (fidelity="bitwise"), or take the parts for what they give with '
    "check=False"
)


def refused(model, loss_fn=F.cross_entropy, t=None, sub_batches=4, **options):
    """The text of the refusal; nothing has changed then."""
    x, labels = images()
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError) as raised:
        gistkit.step(model, loss_fn, x, labels if t is None else t, sub_batches=sub_batches, **options)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    return str(raised.value)


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_rows_that_depend_on_each_other_are_refused(name, parts):
    text = refused(Net(COUPLED[name]), sub_batches=parts)
    if name == "functional batch norm":
        assert text == (
            "step: a batch norm must see the whole batch, and torch.nn.functional.batch_norm in training mode "
            f"would see {parts} sub-batches, each with its own statistics; accept that with "
            f"batch_statistics='per_sub_batch'; {REMEDIES}"
        )
    else:
        start, _, end = text.partition(", by ")
        assert start == (
            "step: the rows of a batch must not depend on each other to be taken in sub-batches, and what the model "
            "gives for a row changes with the rows beside it"
        )
        assert end.endswith(f" of the largest value; {REMEDIES}")


def test_zeros_hide_nothing():
    model = Net(COUPLED["mean"])
    nn.init.zeros_(model.head.weight)
    refused(model)
    assert not model.head.weight.any()


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("loss_fn", [F.cross_entropy, noisy, regularised, nn.CrossEntropyLoss()])
def test_rows_apart_are_stepped(name, loss_fn):
    gistkit.step(Net(copy.deepcopy(APART[name])), loss_fn, *images(), sub_batches=3)


def test_accepted_statistics_are_no_dependence():
    for norm in (nn.BatchNorm2d(8), nn.BatchNorm2d(8, track_running_stats=False), COUPLED["functional batch norm"]):
        gistkit.step(Net(norm), F.cross_entropy, *images(), sub_batches=2, batch_statistics="per_sub_batch")
    refused(Net(COUPLED["mean"]), batch_statistics="per_sub_batch")


def test_rows_in_groups():
    model, twin, (x, t) = Net(Pairs()), Net(Pairs()), images()
    gistkit.step(model, F.cross_entropy, x, t, sub_batches=2)
    F.cross_entropy(twin(x), t).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-6)  # that they add up; bounds: test_step_bounds.py


def test_a_sum_said_to_be_a_mean_and_the_other_way_round():
    assert refused(Net(), cross_entropy_sum).endswith(
        f": that is the sum over its rows; pass reduction='sum'; {REMEDIES}"
    )
    text = refused(Net(), F.cross_entropy, reduction="sum")
    assert text.startswith(
        "step: loss_fn must return the sum over its rows (reduction='sum') for sub-batches to add up"
    )
    assert text.endswith(f": that is the mean over its rows; pass reduction='mean'; {REMEDIES}")
    gistkit.step(Net(), cross_entropy_sum, *images(), sub_batches=4, reduction="sum")


LAST = torch.tensor([0, 1, 2, 3, 4, 0, -100, 2])


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize(("loss_fn", "t"), [(F.cross_entropy, LAST), (weighted, None), (contrastive, None)])
def test_losses_that_do_not_add_up(loss_fn, t, parts):
    text = refused(Net(), loss_fn, t, parts)
    assert text.endswith(
        "; where labels are ignored or classes weighted return the sum, divided by the weight of the whole batch, and "
        f"pass reduction='sum'; one over pairs of rows has no parts; {REMEDIES}"
    )


def test_losses_per_token_with_ignored_labels():
    t = torch.randint(CLASSES, (ROWS, 8, 8))
    model = nn.Conv2d(3, CLASSES, 1)
    gistkit.step(model, F.cross_entropy, images()[0], t, sub_batches=4)
    model.zero_grad()
    t[5, 2] = -100
    refused(copy.deepcopy(model), t=t)
    gistkit.step(model, F.cross_entropy, images()[0], t, sub_batches=4)  # asked once: the docstring says so


def test_check_false_takes_the_parts_for_what_they_give():
    gistkit.step(Net(COUPLED["mean"]), contrastive, *images(), sub_batches=4, check=False)
    with pytest.raises(TypeError, match="step: check must be True or False, got 'no'; False takes the parts for what"):
        gistkit.step(Net(), F.cross_entropy, *images(), check="no")


def test_nothing_is_asked_of_one_part():
    gistkit.step(Net(COUPLED["mean"]), contrastive, *images())


class Counting(nn.Module):
    """Counts its forwards in a buffer and an attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.seen, self.plain = [], torch.zeros(())

    def forward(self, x):
        self.count += 1
        self.plain += 1
        self.seen.append(len(x))
        return x


def test_what_is_asked_leaves_no_trace():
    model = Net(nn.Sequential(Drawn(), Counting()))
    torch.manual_seed(1)
    random.seed(1)
    states = torch.get_rng_state(), random.getstate()
    gistkit.step(model, F.cross_entropy, *images(), sub_batches=2, check=False)
    want = [p.grad for p in model.parameters()]
    model.zero_grad()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    model(images()[0])  # draws, so that the same states must be put back for the next
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    gistkit.step(model, F.cross_entropy, *images(), sub_batches=2)
    assert all(torch.equal(p.grad, q) for p, q in zip(model.parameters(), want, strict=True))
    counting = model.between[1]
    assert counting.seen == [4, 4, 8, 4, 4] and counting.count == counting.plain == 5 and model.training


def test_each_kind_of_step_is_asked_once():
    calls = []

    def loss_fn(out, t):
        calls.append(len(out))
        return F.cross_entropy(out, t)

    model, (x, t) = Net(), images()
    gistkit.step(model, loss_fn, x, t, sub_batches=2)
    assert len(calls) > 2
    del calls[:]
    for _ in range(2):
        gistkit.step(model, lambda out, t: loss_fn(out, t), x, t, sub_batches=2)
    assert calls[-4:] == [4, 4, 4, 4] and calls[-6:-4] != [4, 4]
    del calls[:]
    gistkit.step(model, loss_fn, x, t, sub_batches=2)
    assert calls == [4, 4]
    gistkit.step(model, loss_fn, x, t, sub_batches=4)
    assert len(calls) > 6


class Uncopied(Net):
    def __deepcopy__(self, memo):
        raise TypeError("one of a kind")


def test_what_cannot_be_asked_is_a_warning():
    with pytest.warns(UserWarning) as told:
        gistkit.step(Uncopied(), F.cross_entropy, *images(), sub_batches=2)
    assert str(told[0].message) == (
        f"step: whether sub-batches add up was not found out: TypeError: one of a kind; {REMEDIES}"
    )
    other = Net(lambda x: x + torch.tensor(OWN.random()))
    with pytest.warns(UserWarning, match=r"not found out: two forwards of the same rows differ by \d"):
        gistkit.step(other, F.cross_entropy, *images(), sub_batches=2)
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(CLASSES))
    with pytest.warns(UserWarning, match="not found out: the model has lazy parameters, which its first forward makes"):
        gistkit.step(lazy, F.cross_entropy, *images(), sub_batches=2)


OWN = random.Random(0)


def test_a_loss_narrower_than_the_model_has_its_own_digits():
    def narrow(out, t):
        return F.cross_entropy(out.float(), t)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.LazyLinear(CLASSES)).double()
    for seed in range(8):  # of float64 half the digits are as many as float32 has: some sums of parts are off by more
        x, t = torch.randn(ROWS, 3, 8, 8).double(), torch.randint(CLASSES, (ROWS,))
        model(x)
        expected = narrow(model(x), t).detach()
        loss = gistkit.step(copy.deepcopy(model), narrow, x, t, sub_batches=2 + seed % 3)
        # means of up to four parts, each weighted, and their sum: a rounding each, of numbers no larger than the sum
        assert abs(float(loss - expected)) <= 12 * torch.finfo(torch.float32).eps / 2 * float(expected), seed
