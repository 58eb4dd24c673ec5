"""Training steps of a model, plain and compressed, from the same start: what the runtime's tests compare."""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import gistkit
from gistkit.runtime.stash.verify import same_bits


@dataclass
class Trained:
    """Losses by step, and every tensor of the model and its last gradients by name."""

    losses: list[torch.Tensor]
    state: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor]


def train(
    model: nn.Module, batches: list, loss_fn: Callable = nn.functional.cross_entropy, lr: float = 0.01
) -> Trained:
    """SGD with momentum over the batches; random numbers start from the same seed each time."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Trained(losses, copy.deepcopy(model.state_dict()), grads)


def batches(steps: int, batch: int, size: int, classes: int = 10, seed: int = 0) -> list:
    """Random images and labels."""
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(batch, 3, size, size, generator=g), torch.randint(classes, (batch,), generator=g))
        for _ in range(steps)
    ]


def assert_same(model: nn.Module, twin: nn.Module, data: list, *options, **more) -> None:
    """Both train to the same bits; options as for :func:`train`."""
    plain, other = train(model, data, *options, **more), train(twin, data, *options, **more)
    for step, (a, b) in enumerate(zip(plain.losses, other.losses, strict=True)):
        assert same_bits(a, b), f"loss of step {step}: {a} and {b}"
    for name, tensors, others in (("state", plain.state, other.state), ("grad", plain.grads, other.grads)):
        assert tensors.keys() == others.keys()
        for key, tensor in tensors.items():
            assert same_bits(tensor, others[key]), f"{name} {key}"


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """What runs inside changes no tensor of the model, no gradient and no random state."""

    def state():
        tensors = {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
        states = torch.get_rng_state(), *torch.cuda.get_rng_state_all()
        tensors |= {f"random state {i}": state for i, state in enumerate(states)}
        return model.state_dict() | tensors, (random.getstate(), [np.array(x).tolist() for x in np.random.get_state()])

    before, drawn = copy.deepcopy(state())
    yield
    after, drawn_now = state()
    assert after.keys() == before.keys() and drawn_now == drawn
    assert [name for name, t in after.items() if not same_bits(t, before[name])] == []


def assert_same_training(model: nn.Module, data: list, **options) -> None:
    """A compressed copy trains to the same bits as the model itself."""
    assert_same(model, gistkit.compress(copy.deepcopy(model)), data, **options)


def assert_same_gradients(model: nn.Module, run: Callable, steps: int = 1) -> nn.Module:
    """``run(model, step)`` gives a loss; after each step the gradients of a compressed copy are the model's own."""
    twin = gistkit.compress(copy.deepcopy(model))
    for step in range(steps):
        for m in (model, twin):
            m.zero_grad()
            torch.manual_seed(step)
            run(m, step).backward()
        for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), (step, name)
            assert a.grad is None or same_bits(a.grad, b.grad), (step, name)
    return twin
