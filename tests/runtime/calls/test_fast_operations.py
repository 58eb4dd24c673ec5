# ruff: noqa: F811
"""The short way of batch norms whose input is rounded, and of the same operation by another function."""

import copy

import pytest
import torch
from torch import nn

import gistkit
from tests.support.fast_cases import both, compressed_and_plain, image, long_way, settle, shift, step  # noqa: F401
from tests.support.nn_cases import same_bits


@pytest.mark.parametrize("lossy", ["fp8s", "fp16"])
def test_rounded_inputs_of_batch_norms(compressed_and_plain, long_way, lossy):
    """Against the same network held to the long way: the same bits and the same report."""
    _, plain = compressed_and_plain
    models = [gistkit.compress(copy.deepcopy(plain), lossy=lossy) for _ in range(2)]
    for seed in range(9):
        results, rows = [], []
        for model in models:
            long_way.clear()
            for program in model.forward.engine._programs.values() if model is models[1] else ():
                program.fast[:] = [None] * program.length
            if seed == 7:  # a parameter of another kind, one that is written to
                model.norms[0].weight.requires_grad_(False)
                model.norms[1].register_forward_pre_hook(lambda *_, model=model: shift(model))
            results.append(step(model, image(seed=seed)))
            stats = model.forward.engine.stats
            rows.append((sorted(map(repr, stats.rows)), stats.kept_bytes))
            if seed == 6 and model is models[0]:
                assert "batch_norm" not in long_way
        assert all(same_bits(a, b) for a, b in zip(*results, strict=True)), seed
        assert rows[0] == rows[1]
    assert any("fp" in row for row in rows[0][0])


class InPlaceAtFirst(nn.Module):
    """A ReLU that overwrites its input, until the input is read after it."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 5, 3)
        self.read = False

    def forward(self, x):
        y = self.norm(self.conv(x))
        y = torch.relu(y) + y if self.read else torch.relu_(y)
        return self.head(y).mean((2, 3))


def test_the_same_operation_by_another_function():
    torch.manual_seed(0)
    plain = InPlaceAtFirst()
    models = gistkit.compress(copy.deepcopy(plain)), plain
    settle(models, 4)
    for read in (True, False, True):
        for model in models:
            model.read = read
        both(models)
