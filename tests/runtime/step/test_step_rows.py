"""step in sub-batches: models whose rows depend on each other are refused beforehand."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.runtime.step.row_independence import REMEDIES
from tests.support.step_cases import batch

X, T = batch(8)


class Net(nn.Module):
    """A convolution, something in between, a head over the mean of each map."""

    def __init__(self, between=None):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.between, self.head = nn.Conv2d(3, 8, 3, padding=1), between, nn.Linear(8, 4)

    def forward(self, x):
        x = self.conv(x)
        x = x if self.between is None else self.between(x)
        return self.head(F.relu(x).mean((2, 3)))


class Drawn(nn.Module):
    """Draws of every kind, none of which mixes rows: dropped maps and paths, noise, leaky slopes, Python's own."""

    def forward(self, x):
        x = F.dropout2d(F.dropout(x, 0.5, True), 0.3, True) + 0.1 * torch.randn_like(x)
        x = F.rrelu(x, training=True) * x.new_empty(len(x), 1, 1, 1).bernoulli_(0.5)
        return F.alpha_dropout(x, 0.2, True) if random.random() < 0.5 else x


class Tokens(nn.Module):
    """Attention within a row, over rows as the first dimension."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        return self.attention(tokens, tokens, tokens)[0].transpose(1, 2).view_as(x)


def attending(x):
    """Attention over the rows of a batch."""
    flat = x.flatten(1)
    return ((flat @ flat.T / 200).softmax(1) @ flat).view_as(x)


class Pairs(nn.Module):
    """The difference of two neighbouring rows: parts of an even number of rows add up."""

    def forward(self, x):
        if len(x) % 2:
            raise ValueError("rows come in pairs")
        y = x.view(len(x) // 2, 2, *x.shape[1:])
        return torch.stack([y[:, 0] - y[:, 1], y[:, 1]], 1).view_as(x)


class Centred(nn.Module):
    """Couples rows in training mode."""

    def forward(self, x):
        return x - x.mean(0) if self.training else x


COUPLED = {
    "mean": Centred(),
    "a hundredth": lambda x: x - 1e-2 * x.mean(0, keepdim=True),
    "functional batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "attention over rows": attending,
    "running sum": lambda x: x.cumsum(0),
    "the next row": lambda x: x - 0.5 * x.roll(-1, 0),
    "number": lambda x: x / len(x),
    "maximum": lambda x: x / x.amax(0).clamp(min=0.1),
    "mixed": lambda x: x + 0.3 * x[torch.randperm(len(x))],
}
APART = {
    "nothing": None,
    "drawn": Drawn(),
    "tokens": Tokens(),
    "instance norm": nn.InstanceNorm2d(8),
    "given statistics": nn.BatchNorm2d(8).eval(),
    "spectral": nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 1)),
}


def refused(model, sub_batches=4, loss_fn=F.cross_entropy, **options):
    """The text of the refusal; nothing has changed then."""
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError) as raised:
        gistkit.step(model, loss_fn, X, T, sub_batches=sub_batches, **options)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    return str(raised.value)


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_rows_that_depend_on_each_other_are_refused(name, parts):
    start, _, end = refused(Net(COUPLED[name]), parts).partition(", by ")
    assert start == (
        "step: the rows of a batch must not depend on each other to be taken in sub-batches, and what the model gives "
        "for a row changes with the rows beside it"
    )
    assert end.endswith(f" of the largest value; {REMEDIES}")


def test_zeros_hide_nothing():
    model = Net(Centred())
    nn.init.zeros_(model.head.weight)
    refused(model)
    assert not model.head.weight.any()


@pytest.mark.parametrize("name", APART)
def test_rows_apart_are_stepped(name):
    gistkit.step(Net(copy.deepcopy(APART[name])), F.cross_entropy, X, T, sub_batches=3)


def test_accepted_statistics_are_no_dependence():
    for norm in (nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False, track_running_stats=False)):
        gistkit.step(Net(norm), F.cross_entropy, X, T, sub_batches=2, per_sub_batch_norm=True)
    refused(Net(nn.Sequential(nn.BatchNorm2d(8), Centred())), per_sub_batch_norm=True)


def test_rows_in_groups():
    model, twin = Net(Pairs()), Net(Pairs())
    gistkit.step(model, F.cross_entropy, X, T, sub_batches=2)
    F.cross_entropy(twin(X), T).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-6)  # that they add up
    model.zero_grad()
    assert "ValueError: rows come in pairs" in refused(model, 8)  # smaller parts are checked anew


def test_other_modes_are_checked_anew():
    model = Net(nn.Sequential(Centred()).eval())
    gistkit.step(model, F.cross_entropy, X, T, sub_batches=4)
    model.zero_grad()
    model.between.train()
    refused(model)


def test_check_false_takes_the_parts_for_what_they_give():
    gistkit.step(Net(Centred()), F.cross_entropy, X, T, sub_batches=4, verify=False)
    gistkit.step(Net(Centred()), F.cross_entropy, X, T)


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


def test_the_check_leaves_no_trace():
    model, states = Net(nn.Sequential(Drawn(), Counting())), (torch.get_rng_state(), random.getstate())
    found = []
    for check in (False, True, True):
        model.zero_grad()
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        gistkit.step(model, F.cross_entropy, X, T, sub_batches=2, verify=check)
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(p, q) and torch.equal(p, r) for p, q, r in zip(*found, strict=True))
    counting = model.between[1]
    assert counting.seen == [4] * 6 and counting.count == counting.plain == 6 and model.training


class Uncopied(Net):
    def __deepcopy__(self, memo):
        raise TypeError("one of a kind")


class Opaque(Net):
    """Returns an object of which nothing is known."""

    def forward(self, x):
        other = Opaque()
        other.out = super().forward(x)
        return other


class WithLoss(Net):
    def forward(self, x):
        return super().forward(x).mean()


def test_what_cannot_be_found_out_is_refused():
    unknown = "step: whether rows depend on each other could not be found out: "
    assert refused(Uncopied()) == f"{unknown}TypeError: one of a kind; {REMEDIES}"
    assert refused(Opaque()).startswith(f"{unknown}the model's results, a Opaque, hold no tensors")
    assert "changes with the rows beside it" in refused(WithLoss(), loss_fn=lambda out, t: out)
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(4))
    with pytest.raises(ValueError, match=f"{unknown}ValueError: Attempted to use an uninitialized parameter"):
        gistkit.step(lazy, F.cross_entropy, X, T, sub_batches=2)
