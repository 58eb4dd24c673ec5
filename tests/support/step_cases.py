"""The network and the batch of the tests of gistkit.step."""

import torch
import torch.nn.functional as F
from torch import nn


def net(width=6):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(width, 5, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(5 * 4, 4),
    )  # fmt: skip


def batch(n=7):
    torch.manual_seed(0)
    return torch.randn(n, 3, 8, 8), torch.randint(4, (n,))


class Residual(nn.Module):
    """A stem, a block with a sum around two convolutions, a head; with batch norms of given statistics or without."""

    def __init__(self, norms=False):
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.norm_a, self.norm_b = (nn.BatchNorm2d(4).eval() if norms else nn.Identity() for _ in range(2))
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(4 * 2 * 2, 4)
        for t in (t for norm in (self.norm_a, self.norm_b) for t in (*norm.parameters(), *norm.buffers()) if t.dim()):
            nn.init.uniform_(t, 0.5, 1.5)

    def forward(self, x):
        x = self.stem(x).relu()
        x = (self.norm_b(self.b(self.norm_a(self.a(x)).relu())) + x).relu()
        return self.head(self.pool(x).flatten(1))


class Concatenated(nn.Module):
    """Three branches of one map, among them a pool with overlapping windows, side by side; a mean before the head."""

    def __init__(self):
        super().__init__()
        self.stem, self.narrow, self.pool = nn.Conv2d(3, 6, 3, 2), nn.Conv2d(6, 3, 1), nn.MaxPool2d(3, 1, 1)
        self.wide = nn.Sequential(nn.Conv2d(6, 4, 1), nn.ReLU(), nn.Conv2d(4, 5, 3, padding=1))
        self.pooled, self.head = nn.Conv2d(6, 2, 1), nn.Linear(10, 4)

    def forward(self, x):
        x = self.stem(x).relu()
        x = torch.cat([self.narrow(x).relu(), self.wide(x).relu(), self.pooled(self.pool(x)).relu()], 1)
        return self.head(x.mean((2, 3)))


class Tokens(nn.Module):
    """Linear layers over [rows, tokens, features]; classes per token."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        return self.layers(x)


def per_token(out, t):
    """The loss of Tokens; t: [rows, tokens]."""
    return F.cross_entropy(out.flatten(0, 1), t.flatten())
