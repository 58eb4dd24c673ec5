"""Convolution algorithms as planner data: counts from theory, worked out by hand here."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.ir.tasks import ConvShape, Task
from gistkit.planning.cost.algorithms import DEFAULT, conv_algorithms, layout_bytes, layout_s
from gistkit.planning.cost.devices import PRESETS

CUDNN4 = ["implicit_precomp_gemm", "implicit_gemm", "gemm", "fft", "fft_tiling"]


def conv_task(n, c, k, size, kernel=3, stride=1, part="", groups=1, dilation=1, dtype="float32"):
    out = (size - 1) // stride + 1
    shape = ConvShape(n, c, size, size, k, out, out, (kernel, kernel), (stride, stride), (dilation, dilation), groups)
    flops = 2 * n * k * out * out * (c // groups) * kernel * kernel
    moved = 4 * n * (c * size * size + k * out * out)
    phase = "backward" if part else "forward"
    return Task(0, phase, "conv2d", 0, "", (), (), flops, moved, dtype, part, conv=shape)


TOLD = replace(PRESETS["h200"], name="a framework on an h200", tells_algorithms=True)


def by_name(task, hardware):
    found = PRESETS[hardware] if isinstance(hardware, str) else hardware
    return {a.name: a for a in conv_algorithms(task, found)}


def test_what_each_card_has():
    task = conv_task(32, 64, 64, 56)
    assert [a.name for a in conv_algorithms(task, PRESETS["titanx"])] == CUDNN4
    assert sorted(by_name(task, "k40m")) == sorted([*CUDNN4, "winograd"])
    assert [(a.name, a.workspace_bytes) for a in conv_algorithms(task, PRESETS["cpu"])] == [("direct", 0)]
    # PyTorch cannot be told: what it runs by itself is all there is, with its workspace.
    assert conv_algorithms(task, PRESETS["h200"]) == conv_algorithms(task, TOLD)[:1]
    assert list(by_name(task, "h200")) == [DEFAULT] and by_name(task, "h200")[DEFAULT].workspace_bytes > 0
    assert sorted(by_name(task, TOLD)) == sorted([*CUDNN4, "winograd"])


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


def test_seconds_where_arithmetic_decides():
    task = conv_task(64, 256, 256, 28)
    found, rate = by_name(task, "k40m"), PRESETS["k40m"].flops["float32"]
    assert found[DEFAULT].seconds == pytest.approx(task.flops / rate)
    assert found["implicit_gemm"].seconds == pytest.approx(task.flops / rate / 0.7)
    # 2.25 times fewer multiplications: 16 instead of 4 * 9 for a tile of 2x2 outputs.
    assert found["winograd"].seconds == pytest.approx(task.flops * (16 / 36) / rate / 0.65)
    # 32 x 17 complex products in place of 9 x 28 x 28 real ones: 8 * 544 operations against 2 * 7056.
    products = 8 * 544 * 64 * 256 * 256
    assert found["fft"].seconds > products / rate / 0.8
    assert found["fft"].seconds < found[DEFAULT].seconds


def test_tensor_cores_convert_layouts_and_leave_winograd_behind():
    h200 = PRESETS["h200"]
    task = conv_task(64, 256, 256, 28)
    maps_bytes = 4 * 64 * 512 * 28 * 28
    assert layout_s(task, h200) == pytest.approx(2 * maps_bytes / (h200.memory_gbps * 1e9))
    assert layout_s(task, PRESETS["titanx"]) == 0.0
    found = by_name(task, TOLD)
    assert found[DEFAULT].seconds == pytest.approx(task.flops / h200.flops["tf32"] + layout_s(task, h200))
    assert min(found.values(), key=lambda a: a.seconds).name == DEFAULT


@pytest.mark.parametrize("part", ["", "weight", "input"])
def test_the_default_holds_nhwc_copies_of_both_maps(part):
    # VGG-16's conv1_2 at batch 64: maps of 64 x 64 x 224 x 224 fp32, 784 MiB each; offsets as on every device.
    task = conv_task(64, 64, 64, 224, part=part)
    offsets_bytes = 4 * (64 * 9 + 224 * 224)
    found = by_name(task, TOLD)
    assert layout_bytes(task, PRESETS["h200"]) == 2 * 784 * 2**20
    assert found[DEFAULT].workspace_bytes == 2 * 784 * 2**20 + offsets_bytes
    assert found["implicit_gemm"].workspace_bytes == 0
    # Input and output differ: 8 images, 3 maps of 64x64 in, 32 of 32x32 out, in bf16 half the bytes.
    strided = conv_task(8, 3, 32, 64, stride=2, part=part)
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


SHAPES = st.tuples(
    st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.integers(3, 64), st.sampled_from((1, 3, 5))
)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(SHAPES, st.sampled_from(("", "weight", "input")), st.sampled_from(list(PRESETS)))
def test_laws(shape, part, name):
    hardware = PRESETS[name]
    task = conv_task(*shape, part=part)
    found = conv_algorithms(task, hardware)
    assert len({a.name for a in found}) == len(found)
    assert all(a.seconds >= hardware.launch_s and a.workspace_bytes >= 0 for a in found)
    assert all(type(a.workspace_bytes) is int for a in found)
    assert min(a.workspace_bytes for a in found) == 0 or not hardware.tells_algorithms
    # Twice the batch is at least as long and needs at least the workspace, under every algorithm.
    assert task.conv is not None
    shape2 = replace(task.conv, n=2 * task.conv.n)
    twice = conv_algorithms(
        replace(task, conv=shape2, flops=2 * task.flops, moved_bytes=2 * task.moved_bytes), hardware
    )
    for one, two in zip(found, twice, strict=True):
        assert one.name == two.name
        assert two.seconds >= one.seconds and two.workspace_bytes >= one.workspace_bytes
