"""profile: classes of memory, Gist's and vDNN's figures from the papers' own networks, layers, tables."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from bench.papers.library_view import library_view
from gistkit import zoo
from gistkit.api.profiling import CLASSES, STASHES, profile_graph, stashed_bytes
from gistkit.planning.cost.devices import PRESETS
from gistkit.planning.cost.table import cost_table
from tests.support.graphs import Apply

MIB = 2**20


def images(batch, size=224):
    return torch.empty(batch, 3, size, size, device="meta")


def network(name):
    with torch.device("meta"):
        return zoo.MODELS[name]()


def paper(name, batch):
    """The step as the paper's framework ran it, on its card."""
    graph = gistkit.capture(network(name), (images(batch),), backward=True)
    view = library_view(graph)
    return profile_graph(view, cost_table(view, PRESETS["titanx"]), name)


@pytest.fixture(scope="module")
def vgg16():
    return paper("vgg16", 64)


def shares(parts):
    total = sum(parts.values())
    return {name: nbytes / total for name, nbytes in parts.items()}


def test_gist_fig_3_of_vgg16(vgg16):
    """Gist section III-A: 40 % ReLU-Pool, 49 % ReLU-Conv, 89 % both."""
    found = shares(vgg16.stashed_bytes)
    assert [round(found[name], 2) for name in ("relu_pool", "relu_conv")] == [0.40, 0.49]
    assert round(found["relu_pool"] + found["relu_conv"], 2) == 0.89


def test_gist_fig_3_by_arithmetic():
    """The 13 convolutions alone, the input batch counted: by 64 x 3x224x224 and the shapes of VGG-16."""
    features = network("vgg16").features
    found = stashed_bytes(library_view(gistkit.capture(features, (images(64),), backward=True)))
    maps = {"relu_pool": 0, "relu_conv": 0, "other": 64 * 3 * 224**2 * 4}
    for width, size, convs in ((64, 224, 2), (128, 112, 2), (256, 56, 3), (512, 28, 3), (512, 14, 3)):
        one = 64 * width * size**2 * 4
        maps["relu_conv"] += (convs - 1) * one
        maps["relu_pool"] += one
        maps["other"] += one // 4
    assert found == maps | {"pool_index": 0}
    assert [round(100 * s, 1) for s in shares(maps).values()] == [40.2, 48.8, 11.0]


def test_eager_pytorch_keeps_indices_too():
    """What a walk over ``grad_fn`` gives for VGG-16 at batch 64: 4.37 GiB, a sixth of it indices of pools."""
    found = gistkit.profile(network("vgg16"), images(64), hardware="h200")
    assert sum(found.stashed_bytes.values()) / 2**30 == pytest.approx(4.37, abs=0.005)
    rounded = {name: round(100 * share, 1) for name, share in shares(found.stashed_bytes).items()}
    assert rounded == {"relu_pool": 33.4, "relu_conv": 40.5, "pool_index": 16.7, "other": 9.4}


@pytest.mark.parametrize(("name", "share"), [("vgg16", 0.83), ("googlenet", 0.97)])
def test_gist_fig_1(name, share):
    """Section II-A, batch 64: feature maps and gradient maps are 83 % of VGG-16's and 97 % of Inception's memory.

    Buffers are shared over time there: of each class counts what is there at once.
    """
    found = shares(paper(name, 64).most_bytes)
    assert round(found["stashed"] + found["immediate"] + found["gradient_maps"], 2) == share


def test_vdnn_fig_5(vgg16):
    """Per layer X + Y + workspace are an order of magnitude above the weights, but in the classifier."""
    convs = [layer for layer in vgg16.layers if layer.kind == "CONV"]
    first = convs[0]
    assert (first.x_bytes, first.y_bytes) == (64 * 3 * 224**2 * 4, 64 * 64 * 224**2 * 4)
    assert first.weight_bytes == (64 * 3 * 9 + 64) * 4
    assert all(c.x_bytes + c.y_bytes + c.workspace_bytes > 10 * c.weight_bytes for c in convs[:10])
    classifier = [layer for layer in vgg16.layers if layer.kind == "FC"]
    assert all(c.x_bytes + c.y_bytes < c.weight_bytes for c in classifier)


def test_vdnn_fig_6(vgg16):
    """Section II-C: the first layer's input waits over 1,200 ms in VGG-16 (64), over 60 ms in AlexNet."""
    reuse = [layer.reuse_s for layer in vgg16.layers if layer.reuse_s is not None]
    assert reuse[0] > 1.2 and reuse == sorted(reuse, reverse=True) and reuse[-1] >= 0
    assert paper("alexnet", 128).layers[0].reuse_s > 0.06


def test_every_byte_has_one_class():
    def loss_fn(out, t):
        return F.cross_entropy(out, t)

    found = gistkit.profile(
        network("squeezenet"), images(4), torch.zeros(4, dtype=torch.long), loss_fn=loss_fn, hardware="cpu"
    )
    assert tuple(found.total_bytes) == tuple(found.most_bytes) == tuple(found.memory_bytes) == CLASSES
    by_task = [sum(parts) for parts in zip(*found.memory_bytes.values(), strict=True)]
    assert max(by_task) == found.peak_bytes == by_task[found.peak_task] == sum(found.peak_class_bytes.values())
    assert all(found.peak_class_bytes[c] <= found.most_bytes[c] <= found.total_bytes[c] for c in CLASSES)
    assert found.total_bytes["weights"] == sum(p.numel() for p in network("squeezenet").parameters()) * 4
    assert found.total_bytes["inputs"] == 4 * 8  # the labels; the images are kept for the first convolution
    assert tuple(found.stashed_bytes) == STASHES and sum(found.stashed_bytes.values()) == found.total_bytes["stashed"]


def test_a_relu_that_conv_and_pool_read_counts_as_conv():
    def forward(m, x):
        y = F.relu(m[0](x))
        joined = torch.cat([y, F.relu(y + 1)], 1)
        return m[1](joined).sum() + F.max_pool2d(y, 2).sum() + F.max_pool2d(F.relu(x), 2).sum()

    with torch.device("meta"):
        model = Apply(forward, nn.Conv2d(3, 4, 1), nn.Conv2d(8, 2, 1))
    found = gistkit.profile(model, images(2, 8), hardware="cpu").stashed_bytes
    one = 2 * 4 * 64 * 4
    # y (also through the concatenation), the other ReLU, their concatenation; relu(x) is read by a pool, but needs no
    # gradient and is not kept. The input, and two index maps, of which only y's is kept.
    assert found == {"relu_pool": 0, "relu_conv": 4 * one, "pool_index": 2 * 4 * 16 * 8, "other": 2 * 3 * 64 * 4}


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "text"),
    [
        ((nn.ReLU(),), {}, ValueError, r"profile: batch must hold the model's inputs, got no tensor; pass them after"),
        ((nn.ReLU(), images(2)), {}, ValueError, r"profile: hardware must be given for a model on device 'meta'"),
        ((nn.ReLU(), images(2)), {"loss_fn": 3}, TypeError, r"profile: loss_fn must be callable, got int"),
    ],
)
def test_wrong_arguments(arguments, options, kind, text):
    with pytest.raises(kind, match=text):
        gistkit.profile(*arguments, **({"hardware": "cpu"} if "loss_fn" in options else {}), **options)
