"""The bitwise class: what plain torch.compile computes stays in the very kernels that it computes it in."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.compiled import Settings, record
from tests.compiled.test_partitioner import amp_loss, run
from tests.support.compiled_cases import assert_same, case, loss_of

with warnings.catch_warnings():  # PyTorch's own, of torch.jit
    warnings.simplefilter("ignore")
    from tests.support import gpu_code

from gistkit.compiled.custom import Partitioner


def laid_out(name, rows):
    """A case with images in channels_last, as most people train on a GPU."""
    model, x, y = case(name, rows=rows)
    return model, x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x, y


def test_a_norms_rebuild_reads_the_moment_that_forwards_kernel_reads(as_on_a_gpu):
    model, x, y = case("resnet", rows=256)
    plain, _ = run(loss_of, model, [(x, y)], None)
    bitwise, (graph,) = run(loss_of, model, [(x, y)], Settings())
    assert_same(plain[0], bitwise[0])
    assert sum(row.name.startswith("moment_") and row.reason.startswith("kept for rebuilds") for row in graph.rows) >= 2
    assert graph.kept_bytes < 0.8 * graph.plain_bytes


@pytest.mark.parametrize(
    ("name", "loss"), [("vgg", amp_loss), ("resnet", amp_loss), ("block", amp_loss), ("vgg", loss_of)]
)
def test_results_have_the_same_bits(as_on_a_gpu, name, loss):
    model, x, y = case(name, rows=32)
    plain, _ = run(loss, model, [(x, y)], None)
    ours, (graph,) = run(loss, model, [(x, y)], Settings())
    assert_same(plain[0], ours[0])
    assert graph.kept_bytes < graph.plain_bytes


class NormedImages(nn.Module):
    """A layer norm over the channels of images, whose output plain torch.compile computes anew within a sum."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 32, 3), nn.LayerNorm(32), nn.Conv2d(32, 10, 1)

    def forward(self, x):
        x = self.norm(self.first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.second(F.silu(x)).mean((2, 3))


class NormedTwice(nn.Module):
    """A batch norm and a layer norm over the channels, whose output reads more than Inductor computes in one kernel."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.rows = nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d(64), nn.LayerNorm(64)
        self.second, self.third = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 10, 1)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        y = F.silu(self.rows(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return self.third(x + self.second(y)).mean((2, 3))


class Halved(nn.Module):
    """A convolution's output in halves, as in a CSP block: plain torch.compile saves one, and their concatenation."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.third, self.norm, self.head = nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.Linear(32, 10)

    def forward(self, x):
        one, two = self.first(x).chunk(2, 1)
        x = self.third(torch.cat([one, torch.tanh(self.second(two))], 1))
        return self.head(F.relu(self.norm(x)).mean((2, 3)))


class Bucketed(nn.Module):
    """Scores looked up by the distance of two places, as DeBERTa's: an expanded index is saved, a view."""

    def __init__(self):
        super().__init__()
        self.first, self.scores, self.head = nn.Conv2d(3, 64, 2, 2), nn.Linear(64, 32), nn.Linear(64, 10)

    def forward(self, x):
        x = self.first(x).flatten(2).mT
        places = torch.arange(x.shape[1], device=x.device)
        far = (places[:, None] - places)[None, None].abs()
        index = torch.where(far < 8, far, (far.float().log() * 5).ceil().long()).clamp(0, 31).squeeze(0)
        scores = self.scores(x).gather(-1, index.expand(len(x), -1, -1))
        return self.head((scores.softmax(-1) @ x).mean(1))


def images(make, rows=8):
    torch.manual_seed(0)
    x = torch.randn(rows, 3, 32, 32)
    return make(), x.contiguous(memory_format=torch.channels_last), torch.arange(rows) % 10


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="reads Inductor's code by its private names")
@pytest.mark.parametrize(  # Inductor lowers each twice
    ("made", "loss", "share"),
    [
        (partial(laid_out, "residual", 2048), amp_loss, 0.85),
        (partial(laid_out, "block", 2048), amp_loss, 0.85),
        (partial(images, NormedImages), loss_of, 0.85),
        (partial(images, NormedTwice), loss_of, 0.85),
        (partial(images, Halved), loss_of, 1),
        (partial(images, Bucketed), loss_of, 1),
    ],
)
def test_every_kernel_with_a_sum_is_plain_compiles(as_on_a_gpu, monkeypatch, made, loss, share):
    gpu_code.pretend_gpu(monkeypatch)
    plain = gpu_code.kernels(made, loss)
    with record.collected() as found:
        ours = gpu_code.kernels(made, loss, Partitioner(Settings()))
    for some, others in zip(plain, ours, strict=True):
        assert set(gpu_code.reductions(some)) == set(gpu_code.reductions(others))
    assert gpu_code.reductions(plain[1])
    (graph,) = found
    assert graph.kept_bytes <= share * graph.plain_bytes


@pytest.mark.parametrize(("width", "rebuilt"), [(24, False), (32, True)])
def test_a_mean_is_subtracted_anew_where_its_quotient_is_exact(as_on_a_gpu, width, rebuilt):
    """The kernel that sums makes one operation of the product with 1/24 and the difference."""
    model = nn.Sequential(nn.Linear(48, width), nn.LayerNorm(width), nn.SiLU(), nn.Linear(width, 10))
    _, (graph,) = run(loss_of, model, [(torch.randn(4096, 48), torch.arange(4096) % 10)], Settings())
    assert any(row.form == "rebuild" for row in graph.rows) == rebuilt


def test_inductor_compiles_what_keeps_the_kernels(as_on_a_gpu):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.ReLU()), torch.randn(512, 64)
    x.requires_grad_()
    found = []
    for compiler in (torch.compile, gistkit.compile):
        torch._dynamo.reset()
        model.zero_grad()
        compiled = compiler(model)
        compiled(x).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert_same(*found)
    assert gistkit.report(compiled).kept_bytes < gistkit.report(compiled).plain_bytes


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="reads Inductor's code by its private names")
def test_a_fused_form_changes_kernels_with_sums(monkeypatch):
    """What the test above looks for exists: a mask that is unpacked where a bias's gradient is summed."""
    gpu_code.pretend_gpu(monkeypatch)

    def make():
        torch.manual_seed(0)
        return torch.randn(64, requires_grad=True), torch.randn(2048, 64)

    def loss(bias, x):
        return (x * torch.relu(x @ x[:64] + bias)).sum()

    _, plain = gpu_code.kernels(make, loss, forward=False)
    _, ours = gpu_code.kernels(make, loss, Partitioner(Settings(fidelity="reassociated")), forward=False)
    assert set(gpu_code.reductions(plain)) != set(gpu_code.reductions(ours))


def gelu():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)), torch.zeros(8192, 64)


def silu():
    conv = nn.Conv2d(16, 16, 3, padding=1, bias=False)
    x = torch.zeros(64, 16, 16, 16).contiguous(memory_format=torch.channels_last)
    return nn.Sequential(nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU(), conv), x


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="reads Inductor's code by its private names")
@pytest.mark.parametrize("make", [gelu, silu])
def test_a_rebuild_joins_a_kernel_that_sums_nothing(monkeypatch, make):
    """The activation's output is written by the kernel of its own gradient, or of the norm's output before it."""
    gpu_code.pretend_gpu(monkeypatch)

    def loss(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    plain = gpu_code.kernels(make, loss)
    with record.collected() as found:
        ours = gpu_code.kernels(make, loss, Partitioner(Settings()))
    assert any(row.form == "rebuild" and row.plain_bytes >= 2**19 for graph in found for row in graph.rows)
    assert [len(kernels) for kernels in ours] == [len(kernels) for kernels in plain]
    for some, others in zip(plain, ours, strict=True):
        assert set(gpu_code.reductions(some)) == set(gpu_code.reductions(others))
