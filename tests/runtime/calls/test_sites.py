# ruff: noqa: F811
"""Modules whose forward is interposed on while a compressed forward runs are themselves before, after and in copies."""

import copy
import pickle
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.runtime.calls.hooks import pack_known
from gistkit.runtime.live import LiveBytes
from tests.support.call_cases import Net, both, compressed_and_plain, image, settle  # noqa: F401
from tests.support.models import Call
from tests.support.training import assert_same_gradients


class Seen(nn.Module):
    """Does something within the forward."""

    def __init__(self, work):
        super().__init__()
        self.work = work

    def forward(self, x):
        self.work()
        return x


def kinds(model):
    return [type(m) for m in model.modules()]


def within(models, work):
    """Both models, which do that work with themselves within their forward, once they are settled."""
    for model in models:
        model.pool = nn.Sequential(nn.MaxPool2d(2), Seen(lambda: None))
    settle(models, 3)
    for model in models:
        model.pool[1].work = lambda model=model: work(model)


def test_classes_and_attributes_stay(compressed_and_plain):
    ours, plain = compressed_and_plain
    met = []
    within(compressed_and_plain, lambda model: met.append([repr(model.first), kinds(model)]))
    both(compressed_and_plain)
    assert met[0] == met[1], "within a forward the classes are PyTorch's"
    assert kinds(ours) == kinds(plain)
    assert not any("forward" in vars(m) for m in ours.modules() if m is not ours)


def test_modules_are_put_back_after_an_error(compressed_and_plain):
    ours, _ = compressed_and_plain

    def fail(_):
        raise KeyError("work")

    within(compressed_and_plain, fail)
    with pytest.raises(KeyError):
        ours(image())
    assert not any("forward" in vars(m) for m in ours.modules() if m is not ours)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_made_within_a_forward_run_by_themselves(compressed_and_plain, copied):
    made = []
    within(
        compressed_and_plain, lambda model: made.append([copied(model.first), copied(model.relu), copied(model.stem)])
    )
    both(compressed_and_plain)
    shapes = (2, 8, 4, 4), (2, 8, 4, 4), (2, 3, 4, 4)
    for ours, plain, shape in zip(*made, shapes, strict=True):
        x = torch.randn(shape)
        assert type(ours) is type(plain) and torch.equal(ours(x), plain(x))


@pytest.mark.parametrize(
    "owner, name", [(F, "relu"), (F, "batch_norm"), (nn.ReLU, "forward"), (nn.BatchNorm2d, "forward")]
)
def test_a_function_that_somebody_replaced_is_called(compressed_and_plain, monkeypatch, owner, name):
    settle(compressed_and_plain, 3)
    calls, real = [], getattr(owner, name)

    def replaced(*args, **kwargs):
        calls.append(name)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, replaced)
    counts = []
    for model in compressed_and_plain:
        calls.clear()
        model(image())
        counts.append(len(calls))
    assert counts[0] >= counts[1] > 2, "PyTorch hands its Python functions to a mode under the name that is there"


def test_a_mode_of_somebody_elses_sees_the_calls(compressed_and_plain):
    settle(compressed_and_plain, 3)
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    for model in compressed_and_plain:
        inner = model.norms[1].forward

        def watched(x, inner=inner):
            with Watch():
                return inner(x)

        model.norms[1].forward = watched
    for model in compressed_and_plain:
        seen.clear()
        model(image())
        assert F.batch_norm in seen
    settle(compressed_and_plain, 2)


@pytest.mark.parametrize("options", [dict(padding="same"), dict(padding=1, padding_mode="reflect")])
def test_padding_by_word_or_mode_keeps_no_dense_copy(options):
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 3, **options), nn.ReLU())]
    plain = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1)).train()
    x, kept_bytes = torch.randn(4, 16, 32, 32), []
    for model in (plain, gistkit.compress(copy.deepcopy(plain), lossy="fp8")):
        for _ in range(4):
            with LiveBytes() as live:
                loss = model(x).sum()
                kept_bytes.append(live.current_bytes)
            loss.backward()
    # of the convolutions' inputs fp8 takes a quarter at most; the padding itself keeps its own where it is reflected
    assert kept_bytes[-1] < kept_bytes[0] / 3


POOLS = {
    "average": nn.AvgPool2d(2),
    "average as a function": Call(lambda x: F.avg_pool2d(x, 2)),
    "maxima with a dilation": nn.MaxPool2d(2, 2, 0, 2),
    "maxima of rows": nn.Sequential(nn.Flatten(2), nn.MaxPool1d(2)),
}


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("norm", [nn.Identity(), nn.BatchNorm2d(8)], ids=["", "rebuilt"])
def test_a_pool_behind_a_relu_holds_the_shape_of_its_input(pool, norm):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(), pool, Call(lambda x: x.sum((1, 2))))
    model, x = gistkit.compress(copy.deepcopy(model).train()), torch.randn(4, 3, 16, 16)
    for _ in range(4):  # two of them interposed on as a whole
        with LiveBytes() as live:
            y = model(x)
            kept_bytes = live.current_bytes - y.nbytes
        y.sum().backward()
        assert kept_bytes + x.nbytes == gistkit.report(model).kept_bytes


class Gate(nn.Module):
    """Scales its input, which the product saves; nothing within it is kept in another form."""

    def __init__(self):
        super().__init__()
        self.squeeze = nn.Conv2d(16, 16, 1)

    def forward(self, x):
        return x * self.squeeze(x.mean((2, 3), keepdim=True)).sigmoid()


def test_a_gate_reads_the_stash_of_what_it_scales():
    convs = (nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1) for i in range(3))
    layers = (m for conv in convs for m in (conv, nn.BatchNorm2d(16), nn.ReLU(), Gate()))
    model = nn.Sequential(*layers, Call(lambda x: x.mean((1, 2, 3))))
    ours = assert_same_gradients(model, lambda model, _: model(torch.randn(4, 3, 32, 32)).sum(), steps=4)
    engine = ours.forward.engine
    (sites,) = engine._sites.values()
    gates = [s for s in sites._sites if type(s.ref()) is Gate]
    assert [(type(s).__name__, s._node, s._fields) for s in gates] == [("Reading", "MulBackward0", ("self",))] * 3
    stats = gistkit.report(ours).stats
    gated = [r for r in stats.rows if r.op == "relu" and r.shape == (4, 16, 32, 32)]
    assert len(gated) == 3 and all(r.kept_bytes < r.plain_bytes for r in gated)


class Leaning(Gate):
    """Its product is not the module's last call from the beginning, or from some forward on."""

    def __init__(self, late=False):
        super().__init__()
        self.late = late

    def forward(self, x):
        y = super().forward(x)
        return y.clone() if self.late else y


@pytest.mark.parametrize("late", [True, False], ids=["never the last", "the last at first"])
def test_a_gate_whose_product_is_not_the_last_call_passes_hooks(late, monkeypatch):
    gate, packed = Leaning(late), []
    monkeypatch.setattr("gistkit.runtime.calls.sites.pack_known", lambda *x: packed.append(x) or pack_known(*x))
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), gate, Call(lambda x: x.mean((1, 2, 3)))
    steps = Counter()

    def run(model, _):
        steps[model] += 1
        model[3].late = late or steps[model] > 7
        return model(torch.randn(4, 3, 32, 32)).sum()

    ours = assert_same_gradients(nn.Sequential(*layers), run, steps=9)
    (sites,) = ours.forward.engine._sites.values()
    (site,) = [s for s in sites._sites if type(s.ref()) is Leaning]
    assert type(site).__name__ == "Reading" and site._node == "" and packed


def test_a_call_that_is_kept_as_it_is_runs_plain_though_its_module_has_another():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(a, 16, 3, padding=1) for a in (3, 16))
            self.norms, self.relu = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2)), nn.ReLU()

        def forward(self, x):
            for conv, norm in zip(self.convs, self.norms, strict=True):
                x = self.relu(norm(conv(x)))
            return x  # escapes, so it stays

    model = Shared()
    ours = assert_same_gradients(model, lambda model, _: model(torch.randn(4, 3, 32, 32)).sum(), steps=4)
    (program,) = ours.forward.engine._programs.values()
    first, second = (s.index for s in program.steps if s.op == "relu")
    assert first in program.interposed_calls and second not in program.interposed_calls
    calls = [type(call).__name__ for call in (program.calls[first], program.calls[second])]
    assert calls == ["RebuiltRelu", "PlainRelu"], "the second was specialised where all calls are seen"
    for _ in range(2):  # the fifth step sees all calls, to count zeros, the sixth does not
        program.calls[second] = None
        ours(torch.randn(4, 3, 32, 32)).sum().backward()
    assert program.calls[second] is None
