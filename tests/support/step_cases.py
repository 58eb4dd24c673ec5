"""Small networks, a batch and a step for the tests of the runtime and of gistkit.step."""

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


def block(channels=16):
    first, second = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
    end = nn.MaxPool2d(2), nn.Flatten(), nn.Linear(channels * 256, 10)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), *end)


def run(model, data, **backward):
    x, t = data
    loss = F.cross_entropy(model(x), t)
    loss.backward(**backward)
    return loss
