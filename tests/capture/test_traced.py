"""The traced step: tasks and blocks, checked against what a real step of plain PyTorch holds."""

import pytest
import torch
import torch.nn.functional as F

import gistkit
from gistkit import zoo
from tests.support.graphs import Apply
from tests.support.models import DenseNet, UNet
from tests.support.peaks import held_step, peaks_of_steps

TARGETS = torch.tensor([1, 0, 2, 3])


def captured(model, x, y):
    return gistkit.capture(model, (x,), backward=True, loss_fn=F.cross_entropy, targets=(y,))


def plain_memory(graph):
    """Bytes by task under plain PyTorch, straight from the definition of a block's life."""
    end = len(graph.tasks)
    memory = [t.transient_bytes for t in graph.tasks]
    for b in graph.blocks:
        last = max([b.last, b.holder, *(u.task for u in b.uses)])
        if last > b.last and last + 1 < end and graph.tasks[last + 1].call == graph.tasks[last].call:
            last += graph.tasks[last].part == "weight"
        for t in range(max(0, b.first), min(end - 1, last) + 1):
            memory[t] += b.nbytes
    return memory


@pytest.mark.parametrize(("name", "size"), [("alexnet", 64), ("resnet18", 32), ("DenseNet", 16), ("UNet", 16)])
def test_plain_peak_is_predicted(name, size):
    own = {"DenseNet": DenseNet, "UNet": UNet}
    model = own[name]() if name in own else zoo.load(name, num_classes=10, image_size=size)
    model, x = model.train(), torch.randn(4, 3, size, size)
    y = TARGETS if model(x).dim() == 2 else torch.zeros(4, size, size, dtype=torch.int64)
    predicted = max(plain_memory(captured(model, x, y)))
    assert predicted == peaks_of_steps(model, lambda: held_step(model, F.cross_entropy, x, y), x, y)[1]


def test_tasks_of_a_small_step():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(36, 5)
    )
    graph = captured(model.train(), torch.randn(4, 3, 8, 8), TARGETS)
    ops = [(t.phase, t.op, t.part) for t in graph.tasks if t.op in ("conv2d", "relu", "max_pool2d", "linear")]
    forwards = [("forward", op, "") for op in ("conv2d", "relu", "max_pool2d", "linear")]
    first = ("linear", "weight"), ("linear", "input"), ("max_pool2d", ""), ("relu", ""), ("conv2d", "weight")
    assert ops == [*forwards, *(("backward", op, part) for op, part in first)]
    forward = next(t for t in graph.tasks if t.op == "conv2d")
    assert forward.flops == 2 * 4 * 4 * 6 * 6 * 3 * 9 and forward.conv.kernel == (3, 3)
    assert [t.index for t in graph.tasks] == list(range(len(graph.tasks)))


def test_losses():
    x = torch.randn(2, 4)
    model = Apply(lambda m, x: {"logits": m[0](x), "features": m[0](x).relu()}, torch.nn.Linear(4, 4))
    summed = gistkit.capture(model, (x,), backward=True)
    assert any(t.phase == "backward" and t.op == "relu" for t in summed.tasks)
    own = gistkit.capture(model, (x,), backward=True, loss_fn=lambda out: out["logits"].mean())
    assert not any(t.phase == "backward" and t.op == "relu" for t in own.tasks)
