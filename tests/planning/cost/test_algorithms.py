"""Convolution algorithms as planner data: counts from theory, worked out by hand here."""

from dataclasses import replace

import pytest

from bench.papers.algorithms import paper_algorithms
from gistkit.ir.tasks import ConvShape, Task
from gistkit.planning.cost.algorithms import DEFAULT, layout_bytes
from gistkit.planning.cost.devices import PRESETS
from gistkit.planning.cost.table import task_algorithms

CUDNN4 = ["implicit_precomp_gemm", "implicit_gemm", "gemm", "fft", "fft_tiling"]


def conv_task(n, c, k, size, kernel=3, stride=1, part="", groups=1, dilation=1, dtype="float32"):
    out = (size - 1) // stride + 1
    shape = ConvShape(n, c, size, size, k, out, out, (kernel, kernel), (stride, stride), (dilation, dilation), groups)
    flops = 2 * n * k * out * out * (c // groups) * kernel * kernel
    moved = 4 * n * (c * size * size + k * out * out)
    phase = "backward" if part else "forward"
    return Task(0, phase, "conv2d", 0, "", (), (), flops, moved, dtype, part, conv=shape)


def by_name(task, hardware):
    return {a.name: a for a in paper_algorithms(task, PRESETS[hardware])}


def test_what_each_card_has():
    task = conv_task(32, 64, 64, 56)
    assert list(by_name(task, "titanx")) == CUDNN4
    assert sorted(by_name(task, "k40m")) == sorted(by_name(task, "h200")) == sorted([*CUDNN4, "winograd"])
    assert [(a.name, a.workspace_bytes) for a in paper_algorithms(task, PRESETS["cpu"])] == [("direct", 0)]
    # PyTorch cannot be told: what it runs by itself is all there is, with its workspace.
    assert task_algorithms(task, PRESETS["h200"]) == paper_algorithms(task, PRESETS["h200"])[:1]
    assert by_name(task, "h200")[DEFAULT].workspace_bytes > 0


def test_workspaces_by_hand():
    # 8 images, 64 -> 128 maps of 28x28, 3x3: a map is 30x30 with its padding, transformed as 32x32, whose real
    # spectrum has 32 x 17 complex numbers of 8 bytes; one tile of 32x32 makes 30x30 outputs, so one tile is enough.
    found = by_name(conv_task(8, 64, 128, 28), "k40m")
    spectrum = 32 * 17 * 8
    spectra = (8 * 64 + 64 * 128 + 8 * 128) * spectrum
    assert {name: a.workspace_bytes for name, a in found.items()} == {
        "implicit_precomp_gemm": 4 * (64 * 9 + 28 * 28),
        "implicit_gemm": 0,
        "gemm": 64 * 9 * 28 * 28 * 4,
        "winograd": 16 * 64 * 128 * 4,
        "fft": spectra,
        "fft_tiling": spectra,
    }


def test_a_weight_gradient_by_winograd_transforms_both_maps():
    found = by_name(conv_task(8, 64, 128, 28, part="weight"), "k40m")
    assert found["winograd"].workspace_bytes == 16 * 4 * (64 * 128 + 8 * 14 * 14 * (64 + 128))
    inputs = by_name(conv_task(8, 64, 128, 28, part="input"), "k40m")
    assert inputs["winograd"].workspace_bytes == 16 * 4 * 64 * 128


def test_the_default_holds_nhwc_copies_of_both_maps():
    # VGG-16's conv1_2 at batch 64: maps of 64 x 64 x 224 x 224 fp32, 784 MiB each; offsets as on every device.
    task = conv_task(64, 64, 64, 224)
    offsets_bytes = 4 * (64 * 9 + 224 * 224)
    found = by_name(task, "h200")
    assert layout_bytes(task, PRESETS["h200"]) == 2 * 784 * 2**20
    assert found[DEFAULT].workspace_bytes == 2 * 784 * 2**20 + offsets_bytes
    assert found["implicit_gemm"].workspace_bytes == 0
    # Input and output differ: 8 images, 3 maps of 64x64 in, 32 of 32x32 out, in bf16 half the bytes.
    strided = conv_task(8, 3, 32, 64, stride=2)
    assert layout_bytes(strided, PRESETS["h200"]) == 4 * 8 * (3 * 64 * 64 + 32 * 32 * 32)
    half = replace(strided, dtype="bfloat16")
    assert layout_bytes(half, PRESETS["h200"]) == 2 * 8 * (3 * 64 * 64 + 32 * 32 * 32)


@pytest.mark.parametrize(
    ("task", "lacks"),
    [
        *((conv_task(2, 8, 8, 32, **case), {"winograd", "fft", "fft_tiling"})
          for case in ({"stride": 2}, {"dilation": 2}, {"groups": 4})),
        (conv_task(1, 8, 8, 300), {"fft"}),
        (conv_task(1, 8, 8, 32, kernel=5), {"winograd"}),
    ],
)  # fmt: skip
def test_transforms_need_plain_steps_and_small_maps_and_filters(task, lacks):
    assert {"winograd", "fft", "fft_tiling"} - set(by_name(task, "k40m")) == lacks
