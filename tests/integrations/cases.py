"""A network and data for the training loops of other libraries, and the comparison of what they made of them."""

import torch
from torch import nn

from tests.support.training import same_bits

BATCH = 4
G = torch.Generator().manual_seed(5)
IMAGES, LABELS = torch.randn(4 * BATCH, 3, 16, 16, generator=G), torch.randint(10, (4 * BATCH,), generator=G)

BATCHES = [(i.clone(), t.clone()) for i, t in zip(IMAGES.split(BATCH), LABELS.split(BATCH), strict=True)]


class Net(nn.Module):
    """As transformers' models: takes batches by name and returns a dict with the loss, where it has labels."""

    def __init__(self):
        super().__init__()
        layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))

    def forward(self, images, labels=None):
        logits = self.body(images)
        return {"loss": None if labels is None else nn.functional.cross_entropy(logits, labels), "logits": logits}


def network():
    torch.manual_seed(1)
    return Net()


def assert_same(plain, compressed):
    """Losses and state dicts agree in every bit."""
    (losses, state), (others, other_state) = plain, compressed
    assert len(losses) == len(others) > 0 and list(state) == list(other_state)
    assert all(same_bits(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(losses, others, strict=True))
    assert [name for name, t in state.items() if not same_bits(t, other_state[name])] == []
