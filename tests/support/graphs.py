"""Small networks and helpers for the tests of capture and policy."""

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gistkit import zoo
from gistkit.capture.entry import capture
from gistkit.ir.plan import CallChoice
from gistkit.planning.policies.gist_rules import gist

N = 4 * 8 * 16 * 16  # elements of what captured() hands to its function


def conv(channels=8, **options):
    return nn.Conv2d(channels, channels, 3, padding=1, **options)


class Apply(nn.Module):
    """A module whose forward is a given function of (modules, input)."""

    def __init__(self, function, *modules):
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.function = function

    def forward(self, *args):
        return self.function(self.parts, *args)


class Residual(nn.Module):
    """ResNet's basic block: one in-place ReLU called twice, an in-place addition."""

    def __init__(self, channels=8, project=False):
        super().__init__()
        self.conv1, self.bn1 = conv(channels, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = conv(channels, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.project = nn.Sequential(conv(channels, bias=False), nn.BatchNorm2d(channels)) if project else None

    def forward(self, x):
        identity = x if self.project is None else self.project(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class Double(torch.autograd.Function):
    """A custom function that keeps its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Unsaved(torch.autograd.Function):
    """Reads its input without a trace but its edge."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def fake_batch(*shape):
    """A tensor of that shape without memory."""
    with FakeTensorMode():
        return torch.empty(shape)


def captured(function, *modules, shape=(4, 8, 16, 16)):
    """The graph of a function of (modules, input)."""
    return capture(Apply(function, *modules), (fake_batch(*shape),))


def ops(graph, covered_only=False):
    return [c.op for c in graph.calls if c.covered >= 0 or not covered_only]


def the(graph, op, nth=0):
    """The nth call of an op."""
    return [c for c in graph.calls if c.op == op][nth]


def output_of(graph, op, nth=0):
    """The storage that the nth call of an op returned."""
    return graph.values[the(graph, op, nth).results[0]].storage


def saves_of(graph, storage):
    """(op, field, read) of everything that keeps a storage."""
    return [(c.op, s.field, s.read) for c, s in graph.savers(storage)]


class Functional(nn.Module):
    """One ReLU module thrice, functional calls, tensor methods, concatenation, dict output."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = conv(), conv(), nn.Conv2d(16, 8, 1)
        self.relu = nn.ReLU()

    def forward(self, x):
        a = self.relu(self.a(x))
        b = self.relu(self.b(a)).add(a)
        c = torch.cat((a.relu(), torch.relu(b)), 1)
        d = self.relu(F.dropout(self.c(c), 0.3))
        return {"head": d.flatten(1), "maps": [torch.max_pool2d(d, 2), F.max_pool2d(d, 3, 2)]}


def decisions(graph, **options):
    return {d.storage: d for d in gist(graph, **options).decisions}


def decision(graph, op, nth=0, **options):
    """The decision for what the nth call of an op returned."""
    return decisions(graph, **options).get(output_of(graph, op, nth))


def choice(graph, op, nth=0, **options):
    covered = the(graph, op, nth).covered
    return next((c for c in gist(graph, **options).choices if c.covered == covered), CallChoice(covered, op))


def of_zoo(name, batch=8, size=32):
    """The step of a network of ten classes on ``batch`` images of ``size`` pixels, on the meta device."""
    with torch.device("meta"):
        model = getattr(zoo, name)(num_classes=10, image_size=size)
        return capture(model, (torch.empty(batch, 3, size, size),), backward=True)
