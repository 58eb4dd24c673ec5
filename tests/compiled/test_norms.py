"""Layer norms on a GPU: what their kernels, as Inductor writes them for an H200, do besides."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bench.compiled_bytes import norms_in_fp32
from gistkit.compiled import Settings
from gistkit.compiled.forms import narrow
from gistkit.planning.flow import CHEAP, FREE, MADE, UNKEPT, Flow, Limits, Value
from gistkit.planning.rebuilds import choose

with warnings.catch_warnings():  # PyTorch's own, of torch.jit
    warnings.simplefilter("ignore")
    from tests.support import gpu_code

from gistkit.compiled.custom import Partitioner

reads_code = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="reads Inductor's code by its private names"
)


class Mlp(nn.Module):
    """The second half of a transformer's block."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def stream(width, rows=64, length=256):
    """Rows of ``width`` that layers add to, in fp32 where the first is not rounded."""
    model = nn.Sequential(nn.Linear(32, width), Mlp(width), Mlp(width), nn.LayerNorm(width))
    return model, torch.zeros(rows * 384 // width, length, 32)


def loss(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().mean()


@pytest.fixture
def kernels(monkeypatch):
    """The kernels of backward, by width and settings."""
    gpu_code.pretend_gpu(monkeypatch)
    monkeypatch.setattr(narrow, "converts_to_float8", lambda device: True)

    def of(width, settings):
        with norms_in_fp32():
            return gpu_code.kernels(lambda: stream(width), loss, Partitioner(settings), forward=False)[1]

    return of


@reads_code
@pytest.mark.parametrize(
    ("settings", "again"), [(Settings(fidelity="reassociated"), True), (Settings(lossy="fp8s"), False)]
)
@pytest.mark.parametrize("width", [384, 768])
def test_a_norms_backward_writes_its_output_again(kernels, settings, width, again):
    """The weight's gradient behind it reads that; a kernel of its own would read what the norm's backward reads. With
    codes to decode it is one of its own."""
    backward = kernels(width, settings)
    norms = [text for text in backward if "RSPLIT_SIZE" in text]
    assert ([text.count("tl.store(") for text in norms].count(4) >= 1) == again  # two sums, two tensors
    apart = sum(f"% {width}" in text for text in backward if text.startswith("pointwise"))
    assert (apart == 1) == again  # the loss's gradient


@reads_code
@pytest.mark.parametrize("settings", [Settings(fidelity="reassociated"), Settings(lossy="fp8s")])
def test_norms_of_a_stream_in_fp32_have_one_kernel_each(monkeypatch, settings):
    """What forward normalises is kept in fp32 there. Rebuilt from three and more tensors, with more than ten operands,
    a norm's backward would be divided into two kernels that read all of them."""
    gpu_code.pretend_gpu(monkeypatch)
    monkeypatch.setattr(narrow, "converts_to_float8", lambda device: True)

    def make():
        x = torch.zeros(64, 256, 384).requires_grad_()
        return nn.Sequential(*(Mlp(384) for _ in range(4)), nn.LayerNorm(384)), x

    with norms_in_fp32():
        _, backward = gpu_code.kernels(make, loss, Partitioner(settings), forward=False)
    norms = [text for text in backward if "RSPLIT_SIZE" in text]
    assert norms and all(text.count("tl.load(") <= 10 for text in norms)
    divided = [text for text in backward if text.startswith("pointwise") and repr(1 / 384) in text]
    assert len(divided) <= (settings.lossy is None)  # as under torch.compile


def test_a_rebuild_needs_nothing_that_only_forward_makes():
    """``r`` keeps ``y`` within two sources. Without it there are two as well, but ``g`` is not kept any more, and would
    be computed from the pair of a norm's statistics."""
    values = (
        Value("x", (), FREE, 0, 0, 100), Value("z", (), FREE, 1, 0, 100), Value("pair", ("x",), MADE, -1, UNKEPT, 0),
        Value("g", ("pair",), MADE, 2, 90, 90), Value("r", ("g", "z"), CHEAP, 3, 100, 100),
        Value("y", ("x", "r"), CHEAP, 4, 300, 300, needed=True, by_row=True),
    )  # fmt: skip
    choice = choose(Flow({v.name: v for v in values}), Limits(least_bytes=1, bitwise=False))
    (cone,) = choice.cones
    assert cone.leaves == ("x", "r") and choice.kept == ("r",)
