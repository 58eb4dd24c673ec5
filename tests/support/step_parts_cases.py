"""Models and losses whose sub-batches add up, and such whose do not."""

import random

import torch
import torch.nn.functional as F
from torch import nn

ROWS, CLASSES = 8, 5


def images(rows=ROWS):
    torch.manual_seed(0)
    return torch.randn(rows, 3, 8, 8), torch.arange(rows) % CLASSES


class Net(nn.Module):
    """A convolution, something in between, a head over the mean of each map."""

    def __init__(self, between=None, head=True):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.between = nn.Conv2d(3, 8, 3, padding=1), between
        self.head = nn.Linear(8, CLASSES) if head else nn.Identity()

    def forward(self, x):
        x = self.conv(x)
        if self.between is not None:
            x = self.between(x)
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
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        tokens = self.norm(x.flatten(2).transpose(1, 2))
        return self.attention(tokens, tokens, tokens)[0].transpose(1, 2).view_as(x)


class Attending(nn.Module):
    """Attention over the rows of a batch."""

    def forward(self, x):
        flat = x.flatten(1)
        return ((flat @ flat.T / 200).softmax(1) @ flat).view_as(x)


class Pairs(nn.Module):
    """The difference of two neighbouring rows: parts of an even number of rows add up."""

    def forward(self, x):
        if len(x) % 2:
            raise ValueError("rows come in pairs")
        y = x.view(len(x) // 2, 2, *x.shape[1:])
        return torch.stack([y[:, 0] - y[:, 1], y[:, 1]], 1).view_as(x)


def mixed(x):
    return x + 0.3 * x[torch.randperm(len(x), device=x.device)]


COUPLED = {
    "mean": lambda x: x - x.mean(0, keepdim=True),
    "a thousandth": lambda x: x - 1e-3 * x.mean(0, keepdim=True),
    "functional batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "attention over rows": Attending(),
    "running sum": lambda x: x.cumsum(0),
    "the next row": lambda x: x - 0.5 * x.roll(-1, 0),
    "number": lambda x: x / len(x),
    "maximum": lambda x: x / x.amax(0).clamp(min=0.1),
    "mixed": mixed,
}
APART = {
    "nothing": None,
    "drawn": Drawn(),
    "tokens": Tokens(),
    "instance norm": nn.InstanceNorm2d(8),
    "group norm": nn.GroupNorm(2, 8),
    "prelu": nn.PReLU(8),
    "given statistics": nn.BatchNorm2d(8).eval(),
    "spectral": nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 1)),
}


def cross_entropy_sum(out, t):
    return F.cross_entropy(out, t, reduction="sum")


def contrastive(out, t):
    return F.cross_entropy(10 * out @ out.T, torch.arange(len(out), device=out.device))


def weighted(out, t):
    return F.cross_entropy(out, t, torch.tensor([1.0, 5.0, 0.1, 2.0, 3.0]))


def noisy(out, t):
    return F.cross_entropy(F.dropout(out, 0.5) + torch.randn_like(out), t)


def regularised(out, t):
    return F.cross_entropy(out, t) + 0.1 * out.square().mean()
