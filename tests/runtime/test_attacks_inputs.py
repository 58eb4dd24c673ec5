"""Kinds of tensors and arguments under which a compressed model once failed or grew where plain PyTorch does not."""

import copy

import pytest
import torch
from torch import nn

import gistkit
from gistkit.runtime.attach import compressed_forward
from gistkit.runtime.stash.verify import same_bits
from tests.runtime.test_attacks import images


def sparse_inside(y):
    return torch.relu(y[0, 0].to_sparse()).to_dense()


def sparse_product(y):
    weights = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.ones(2), (32, 32), check_invariants=False)
    return torch.sparse.mm(weights, y[0, 0])


def nested(y):
    rows = torch.nested.as_nested_tensor([y[0, 0], y[1, 0, :5]])
    return torch.relu(rows).to_padded_tensor(0.0)


class Around(nn.Module):
    """Convolutions around something unusual."""

    def __init__(self, inside):
        super().__init__()
        self.stem, self.conv, self.inside = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3), inside

    def forward(self, x, *more):
        y = torch.relu(self.stem(x))
        return self.inside(y, *more).sum() + self.conv(y).mean()


@pytest.mark.filterwarnings("ignore:.*nested tensor:UserWarning", "ignore:.*Sparse:UserWarning")
@pytest.mark.parametrize("inside", [sparse_inside, sparse_product, nested])
def test_tensors_without_plain_storage(inside):
    plain = Around(inside)
    twin = gistkit.compress(copy.deepcopy(plain))
    for _ in range(3):
        for model in (plain, twin):
            model.zero_grad()
            model(images()).backward()
        for a, b in zip(plain.parameters(), twin.parameters(), strict=True):
            assert same_bits(a.grad, b.grad)


@pytest.mark.parametrize("numbers", [[0.1 * i for i in range(12)], list(range(40))], ids=["floats", "ints"])
def test_numbers_among_the_arguments_do_not_pile_up_plans(numbers):
    model = gistkit.compress(Around(lambda y, scale: y * scale))
    for number in numbers:
        model(images(2), number).backward()
    engine = compressed_forward(model).engine
    assert len(engine._programs) <= 17 and len(engine._densities) <= 17
    if isinstance(numbers[0], float):
        assert len(engine._programs) == 1
