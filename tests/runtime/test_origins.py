"""What is rebuilt is what its recipe names, also where a forward makes the same calls over other values."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.nn import norm
from gistkit.runtime.rebuild import arithmetic
from gistkit.runtime.rebuild.arithmetic import Kind, arithmetics
from tests.support.nn_cases import same_bits

CHANGES = {
    "scaled": lambda y: y * 2,
    "scaled in place": lambda y: y.mul_(2),
    "mixed": lambda y: torch.lerp(y, y.flip(0), 0.7),
    "dropped path": lambda y: y * torch.tensor([0.0, 2.0, 0.0, 2.0]).view(4, 1, 1, 1),
    "rounded": lambda y: y.bfloat16().float(),
    "transposed": lambda y: y.transpose(2, 3),
}
TURNS = [
    ("norm", "scaled"), ("norm", "rounded"), ("branch", "mixed"), ("branch", "scaled in place"), ("identity", "scaled"),
    ("identity", "transposed"), ("sum", "scaled in place"), ("sum", "dropped path"), ("order", ""),
]  # fmt: skip


class Block(nn.Module):
    """Two residual blocks; ``turn`` = (where, what) goes between a batch norm and the ReLU that is rebuilt."""

    def __init__(self, inplace):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(6))
        self.relu = nn.ReLU(inplace)
        self.turn: tuple[str, str] = ("", "")

    def changed(self, where, y):
        return CHANGES[self.turn[1]](y) if self.turn[0] == where else y

    def forward(self, x):
        x = self.relu(self.norms[0](self.convs[0](x)))
        for i in (1, 3):
            y = self.relu(self.changed("norm", self.norms[i](self.convs[i](x))))
            y = self.changed("branch", self.norms[i + 1](self.convs[i + 1](y)))
            y = y + self.changed("identity", x)
            x = self.relu(self.changed("sum", y))
        a, b = self.norms[0](self.convs[5](x)), self.norms[5](self.convs[5](x * 2))
        if self.turn[0] == "order":
            a, b = b, a
        a, b = self.relu(a), self.relu(b)
        return torch.addcmul(self.convs[5](a), self.convs[4](b), b, value=2.0).mean((2, 3))


def gradients(model, seed):
    x = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    loss = F.cross_entropy(model(x), torch.arange(4))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


@pytest.mark.parametrize(("turn", "inplace"), [(turn, bool(i % 2)) for i, turn in enumerate(TURNS)])
def test_what_came_about_otherwise_is_not_rebuilt(turn, inplace):
    plain = Block(inplace)
    ours = gistkit.compress(copy.deepcopy(plain))
    for seed, now in enumerate([("", ""), ("", ""), turn, turn, ("", ""), turn, ("", "")]):
        found = []
        for model in (ours, plain):
            model.turn = now
            found.append(gradients(model, seed))
        assert all(same_bits(a, b) for a, b in zip(*found, strict=True)), seed
    rebuilt = [r for r in gistkit.report(ours).stats.rows if r.codec == "rebuild"]
    assert len(rebuilt) == 6, "a forward as captured is rebuilt"


def forgets(x, mean, invstd, weight, bias):
    """Right for unit weights and zero biases, as a network begins with."""
    return norm._fused(x, mean, invstd, torch.ones_like(mean), torch.zeros_like(mean))


def rounds_twice(x, mean, invstd, weight, bias):
    """Right where the means are zero."""
    alpha = weight * invstd
    over = (1, -1) + (1,) * (x.dim() - 2)
    return torch.addcmul((bias - mean * alpha).view(over), x, alpha.view(over))


@pytest.mark.parametrize(("wrong", "shape"), [(forgets, (4, 16, 8, 8)), (rounds_twice, (6, 5))])
def test_what_fits_a_first_step_by_chance_is_not_relied_on(monkeypatch, wrong, shape):
    """Arithmetic is found by drawn tensors, whatever the network's own data would suggest."""
    half = torch.randn(shape)
    x = torch.cat((half, -half))
    weight, bias = torch.ones(shape[1]), torch.zeros(shape[1])
    y, mean, invstd, _, _ = torch._batch_norm_impl_index(x, weight, bias, None, None, True, 0.1, 1e-5, False)
    assert torch.equal(wrong(x, mean, invstd, weight, bias), y)
    (right,) = [c for c in norm.rebuild_candidates(x) if c.__name__ == "_fused"]
    monkeypatch.setattr(arithmetic, "rebuild_candidates", lambda x: [wrong, right])
    state = torch.get_rng_state()
    kind = Kind(tuple(x.shape), x.stride(), x.dtype, x.device, torch.float32, 1e-5)
    assert arithmetics({}, kind) == [right]
    assert torch.equal(torch.get_rng_state(), state)
