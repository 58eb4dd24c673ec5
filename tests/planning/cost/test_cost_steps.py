"""Predicted seconds of whole steps beside measured ones: what the presets' assumed figures were chosen for."""

import pytest
import torch

from bench.papers.algorithms import paper_algorithms
from gistkit import capture, zoo
from gistkit.planning.cost.devices import PRESETS
from gistkit.planning.cost.table import cost_table


def seconds(name, batch, hardware, fastest=False):
    graph = capture(zoo.load(name), (torch.empty(batch, 3, 224, 224, device="meta"),), backward=True)
    costs = cost_table(graph, PRESETS[hardware], **({"ways": paper_algorithms} if fastest else {}))
    tasks = range(len(graph.tasks))
    return sum(costs.task_s(t, costs.performance_optimal(t) if fastest else "") for t in tasks)


def test_the_titan_x_of_the_papers():
    # cuDNN 4 with its fastest algorithms, fp32, on a Titan X (Maxwell): github.com/soumith/convnet-benchmarks, AlexNet
    # without dropout and softmax. One device figure and three efficiencies stand for all layers: 20 %.
    assert 1e3 * seconds("alexnet", 128, "titanx", fastest=True) == pytest.approx(81, rel=0.2)


def test_the_h200():
    # The median of the step benchmark, plain fp32, batch 64, with SGD and momentum: parameter and momentum read and
    # written, gradient read. VGG-16 is what the rate of TF32 convolutions was fitted to.
    optimiser_s = 5 * 4 * 138_357_544 / (PRESETS["h200"].memory_gbps * 1e9)
    assert 1e3 * (seconds("vgg16", 64, "h200") + optimiser_s) == pytest.approx(48.2, rel=0.03)
