"""Models that draw a number for each layer to leave it out, as BART, OPT and Whisper do, with the probability 0 by
default: they can be captured, and steps have plain PyTorch's bits."""

import copy

import pytest
import torch
from torch import nn

import gistkit


class Layers(nn.Module):
    def __init__(self, chance, draw):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.chance, self.draw = chance, draw

    def forward(self, x):
        for layer in self.layers:
            if self.training and self.draw() < self.chance:
                continue
            x = torch.relu(layer(x).tanh())
        return x.square().mean()


DRAWS = {
    "tensor": lambda: torch.rand([]),
    "of one element": lambda: torch.rand(1),
    "number": lambda: torch.rand(()).item(),
}


def losses_and_gradients(model, seeds):
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        model.zero_grad(set_to_none=True)
        loss = model(torch.randn(64, 32))
        loss.backward()
        found += [loss.detach(), *(p.grad for p in model.parameters())]
    return found


def made(chance, draw):
    torch.manual_seed(0)
    return Layers(chance, DRAWS[draw]).train()


@pytest.mark.parametrize("draw", DRAWS)
def test_a_plan_of_layers_that_are_never_left_out(draw):
    model = made(0.0, draw)
    plan = gistkit.plan(model, torch.randn(64, 32), loss_fn=lambda loss: loss, policy="checkpoint")
    assert any(d.codec == "recompute" for d in plan.decisions)
    found = losses_and_gradients(gistkit.compress(copy.deepcopy(model), plan), range(3))
    assert all(torch.equal(a, b) for a, b in zip(losses_and_gradients(model, range(3)), found, strict=True))


@pytest.mark.parametrize("draw", DRAWS)
def test_layers_that_are_left_out_now_and_then(draw):
    """The likelier way is captured, nothing is drawn for that, and where a forward takes the other way it is no
    longer the plan's: a plan of the caller's says so, ``compress`` goes on."""
    model, state = made(0.3, draw), torch.get_rng_state()
    graph = gistkit.capture(model, (torch.empty(64, 32),), backward=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(call.op == "linear" for call in graph.calls) == 6
    plain, found = (losses_and_gradients(m, range(8)) for m in (model, gistkit.compress(copy.deepcopy(model))))
    assert all((a is b is None) or torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    plan = gistkit.plan(model, torch.randn(64, 32), loss_fn=lambda loss: loss, policy="checkpoint")
    with pytest.raises(gistkit.PlanMismatchError):
        losses_and_gradients(gistkit.compress(model, plan), range(8))


def test_a_drawn_number_that_is_multiplied_is_a_tensor_as_any():
    torch.manual_seed(0)
    layer = nn.Linear(32, 32)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return torch.relu(self.layer(x) * torch.rand(1)).square().mean()

    model = Scaled()
    plan = gistkit.plan(model, torch.randn(64, 32), loss_fn=lambda loss: loss, policy="checkpoint")
    found = losses_and_gradients(gistkit.compress(copy.deepcopy(model), plan), range(3))
    assert all(torch.equal(a, b) for a, b in zip(losses_and_gradients(model, range(3)), found, strict=True))
