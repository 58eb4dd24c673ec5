"""Predicted seconds of whole steps beside measured ones: what the presets' assumed figures were chosen for."""

import pytest
import torch

from gistkit import capture, zoo
from gistkit.planning.cost.devices import PRESETS
from gistkit.planning.cost.table import cost_table


def seconds(name, batch, hardware, fastest):
    graph = capture(zoo.load(name), (torch.empty(batch, 3, 224, 224, device="meta"),), backward=True)
    costs = cost_table(graph, PRESETS[hardware])
    tasks = range(len(graph.tasks))
    return sum(costs.task_s(t, costs.performance_optimal(t) if fastest else "") for t in tasks)


@pytest.mark.parametrize(
    ("name", "batch", "measured_ms", "within"),
    [
        # cuDNN 4 with its fastest algorithms, fp32, on a Titan X (Maxwell): github.com/soumith/convnet-benchmarks,
        # without dropout and softmax. One device figure and three efficiencies stand for all layers: 20 %.
        ("alexnet", 128, 81, 0.2),
    ],
)
def test_the_titan_x_of_the_papers(name, batch, measured_ms, within):
    assert 1e3 * seconds(name, batch, "titanx", True) == pytest.approx(measured_ms, rel=within)


@pytest.mark.parametrize(
    ("name", "measured_ms", "optimiser_bytes", "within"),
    [
        # Medians of the step benchmark, plain fp32, batch 64, with SGD and momentum: parameter and momentum read and
        # written, gradient read. VGG-16 is what the rate of TF32 convolutions was fitted to; ResNet-50 takes 15 %
        # longer than predicted, where many small operators lie between the convolutions.
        ("vgg16", 48.2, 5 * 4 * 138_357_544, 0.03),
        ("resnet50", 32.3, 5 * 4 * 25_557_032, 0.2),
    ],
)
def test_the_h200(name, measured_ms, optimiser_bytes, within):
    optimiser_s = optimiser_bytes / (PRESETS["h200"].memory_gbps * 1e9)
    assert 1e3 * (seconds(name, 64, "h200", False) + optimiser_s) == pytest.approx(measured_ms, rel=within)
