"""The short way of covered calls: taken where nothing has changed, left where anything has; the bits are the same."""

import copy
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.nn import norm
from gistkit.runtime import fast, interpose, native, telling
from tests.nn_cases import same_bits


class Net(nn.Module):
    """Convolutions with and without a bias, two residual blocks, a pool; ``turn`` is what a forward does otherwise."""

    def __init__(self):
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=i == 1) for i in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))
        self.relu, self.pool, self.head = nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Linear(8, 5)
        self.turn = ""

    def forward(self, x):
        x = self.pool(self.relu(self.first(self.stem(x))))
        for i in (0, 2):
            y = self.norms[i](self.convs[i](x))
            y = torch.relu(y) if self.turn == "function" else self.relu(y)
            if self.turn == "view":
                y = y.view(y.shape)
            y = self.convs[i + 1](y)
            if self.turn == "skipped" and i == 2:
                return self.head(y.mean((2, 3)))
            if self.turn == "written":
                y.mul_(2)
            x = self.relu(self.norms[i + 1](y) + x)
            if self.turn == "alpha":
                x = torch.add(x, x, alpha=0.5)
        return self.head(x.mean((2, 3)))


@pytest.fixture(params=["by parts", "in one pass"])
def compressed_and_plain(request, monkeypatch):
    """A compressed network and its plain copy; ``in one pass`` as on a GPU, by gistkit's kernel."""
    if request.param == "in one pass":
        monkeypatch.setattr(telling, "rebuild_candidates", lambda x: list(norm.KERNEL_CANDIDATES))
        monkeypatch.setitem(native.JOINT_BYTES, "cpu", 2**20)
    torch.manual_seed(0)
    plain = Net()
    return gistkit.compress(copy.deepcopy(plain)), plain


@pytest.fixture
def long_way(monkeypatch):
    """The functions of the covered calls that went the long way."""
    seen = []
    real = interpose.Interposer._call

    def call(self, op, func, args, kwargs):
        if op is not None:
            seen.append(op)
        return real(self, op, func, args, kwargs)

    monkeypatch.setattr(interpose.Interposer, "_call", call)
    return seen


def image(batch=4, size=16, seed=0):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def step(model, x=None):
    """Loss, gradients and buffers of a step that moves the parameters."""
    x = image() if x is None else x
    model.zero_grad()
    loss = F.cross_entropy(model(x), torch.arange(x.shape[0]) % 5)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.01)
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def both(models, *args):
    """The step of both, which must agree."""
    ours, plain = (step(model, *args) for model in models)
    assert len(ours) == len(plain) and all(same_bits(a, b) for a, b in zip(ours, plain, strict=True))


def settle(models, steps=7):
    for seed in range(steps):
        both(models, image(seed=seed))


def test_a_steady_step_goes_the_short_way(compressed_and_plain, long_way):
    settle(compressed_and_plain)
    long_way.clear()
    both(compressed_and_plain)
    assert sorted(long_way) == ["linear", "max_pool2d", "relu"], "but the ReLU whose mask the pool carries"


def test_the_report_says_the_same_of_either_way(compressed_and_plain):
    model, _ = compressed_and_plain
    rows = []
    for _ in range(4):
        model(image()).sum().backward()
        rows.append(sorted((replace(r, reason="") for r in model.forward.engine.stats.rows), key=repr))
    assert rows[0] == rows[3] and any(r.codec == "rebuild" for r in rows[3])


@pytest.mark.parametrize("turn", ["function", "written", "view", "skipped", "alpha"])
def test_a_forward_that_turns_aside(compressed_and_plain, turn):
    settle(compressed_and_plain, 3)
    for turned in (turn, turn, "", ""):
        for model in compressed_and_plain:
            model.turn = turned
        both(compressed_and_plain)


def _frozen(model):
    model.convs[0].weight.requires_grad_(False)
    model.norms[2].weight.requires_grad_(False)


def _replaced(model):
    generator = torch.Generator().manual_seed(1)
    model.before = [[layer.weight for layer in (model.convs[1], *model.norms)]]  # they live on
    for layer in (model.convs[1], model.norms[1], model.norms[3]):
        layer.weight = nn.Parameter(torch.rand(layer.weight.shape, generator=generator))


def _strided(model):
    model.convs[2].stride = (1, 1)
    model.convs[2].padding, model.convs[2].dilation = (2, 2), (2, 2)


def _numbers(model):
    model.norms[0].momentum, model.norms[1].eps, model.first.momentum = 0.3, 0.1, None


def _evaluated(model):
    model.norms[0].eval()


def _not_in_place(model):
    model.relu.inplace = False


def _without_affine(model):
    model.norms[2].weight = model.norms[2].bias = None


@pytest.mark.parametrize("change", [_frozen, _replaced, _strided, _numbers, _evaluated, _not_in_place, _without_affine])
def test_a_model_that_was_changed(compressed_and_plain, change):
    settle(compressed_and_plain, 3)
    for model in compressed_and_plain:
        change(model)
    settle(compressed_and_plain, 3)


def test_another_dtype_and_back(compressed_and_plain):
    settle(compressed_and_plain, 3)
    for dtype in (torch.bfloat16, torch.float32):
        for model in compressed_and_plain:
            model.to(dtype)
        for _ in range(2):
            both(compressed_and_plain, image().to(dtype))


def test_parameters_of_another_dtype_alone(compressed_and_plain):
    with torch.autocast("cpu", torch.bfloat16):
        settle(compressed_and_plain, 3)
        for model in compressed_and_plain:
            model.norms[0].bfloat16()
            model.norms[2].bfloat16()
        settle(compressed_and_plain, 3)


def test_other_sizes_and_layouts_in_turn(compressed_and_plain):
    last = image(seed=9).contiguous(memory_format=torch.channels_last)
    for x in (image(), image(), image(2), image(size=12), last, image(), last, image(2)):
        both(compressed_and_plain, x)


def test_autocast_now_and_then(compressed_and_plain):
    for enabled in (False, False, True, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            both(compressed_and_plain)


def test_autocast_within_the_forward(compressed_and_plain):
    settle(compressed_and_plain, 3)
    for model in compressed_and_plain:
        inner = model.convs[2].forward
        model.convs[2].forward = lambda x, inner=inner: _lowered(inner, x)
    settle(compressed_and_plain, 3)


def _lowered(inner, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = inner(x)
    return y.float()


def test_evaluation_and_foreign_hooks_between_steps(compressed_and_plain):
    settle(compressed_and_plain, 3)
    outputs = [model.eval()(image()) for model in compressed_and_plain]
    assert same_bits(*outputs)
    for model in compressed_and_plain:
        model.train()
    both(compressed_and_plain)
    with torch.autograd.graph.save_on_cpu():
        both(compressed_and_plain)
    both(compressed_and_plain)


def test_foreign_hooks_within_the_forward_see_what_is_saved(compressed_and_plain):
    settle(compressed_and_plain, 3)
    seen = {model: [] for model in compressed_and_plain}
    for model in compressed_and_plain:
        for layer in (model.norms[0], model.convs[1]):
            layer.forward = lambda x, inner=layer.forward, seen=seen[model]: _watched(inner, x, seen)
    for _ in range(3):
        both(compressed_and_plain)
    ours, theirs = seen.values()
    assert ours == theirs and len(ours) > 6


def _watched(inner, x, seen):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        return inner(x)


def test_gradients_off_for_a_part(compressed_and_plain):
    settle(compressed_and_plain, 3)
    for model in compressed_and_plain:
        inner = model.convs[0].forward
        model.convs[0].forward = lambda x, inner=inner: _without_gradient(inner, x)
    settle(compressed_and_plain, 3)


def _without_gradient(inner, x):
    with torch.no_grad():
        return inner(x)


def test_an_optimiser_that_writes_between_forward_and_backward(compressed_and_plain):
    """Biases are read by no backward of PyTorch's; a rebuild reads the copy that forward made."""
    settle(compressed_and_plain, 3)
    gradients = []
    for model in compressed_and_plain:
        model.zero_grad()
        loss = model(image()).sum()
        with torch.no_grad():
            for layer in model.norms:
                layer.bias.add_(1)
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(same_bits(a, b) for a, b in zip(*gradients, strict=True))


def test_parameters_written_within_the_forward(compressed_and_plain):
    settle(compressed_and_plain, 3)
    for model in compressed_and_plain:
        model.convs[1].register_forward_hook(lambda *_, model=model: shift(model))
    settle(compressed_and_plain, 3)


def shift(model):
    with torch.no_grad():
        model.norms[2].weight.mul_(1.5)
        model.norms[2].bias.add_(0.5)


def test_threads_side_by_side(compressed_and_plain):
    model, plain = compressed_and_plain
    settle(compressed_and_plain, 3)
    want = [torch.autograd.grad(plain(image(batch)).sum(), plain.convs[1].weight)[0] for batch in (2, 4)]
    wrong = []

    def work(i, batch):
        for _ in range(5):
            got = torch.autograd.grad(model(image(batch)).sum(), model.convs[1].weight)[0]
            wrong.append(not same_bits(got, want[i]))

    threads = [threading.Thread(target=work, args=(i, batch)) for i, batch in enumerate((2, 4))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 10 and not any(wrong)


def test_a_graph_that_is_retained(compressed_and_plain):
    settle(compressed_and_plain, 3)
    results = []
    for model in compressed_and_plain:
        loss = model(image()).sum()
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        results.append([*first, *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        loss = compressed_and_plain[0](image()).sum()
        loss.backward()
        loss.backward()


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.double(),
        lambda x: x[:, :1],
        lambda x: x.transpose(2, 3),
        lambda x: x.detach().requires_grad_(),
        lambda x: x.to("meta"),
        lambda x: x.to_sparse(),
        lambda x: nn.Parameter(x),
        lambda x: None,
    ],
)
def test_a_kind_tells_tensors_apart(other):
    x = torch.randn(2, 3, 4, 4)
    kind = fast.Kind(x)
    assert kind.fits(torch.zeros(2, 3, 4, 4)) and not kind.fits(other(x))


def test_a_plan_of_the_callers_goes_the_long_way(long_way):
    torch.manual_seed(0)
    model = Net()
    gistkit.compress(model, gistkit.plan(model, image()))
    step(model)
    first = len(long_way)
    step(model)
    assert len(long_way) == 2 * first
