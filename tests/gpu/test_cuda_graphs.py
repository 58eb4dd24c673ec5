"""Training steps as CUDA graphs, captured by gistkit.GraphedStep and replayed."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.errors import GistError, PlanMismatchError
from gistkit.runtime import compressed_forward
from gistkit.runtime.step import graphed
from gistkit.training import Accuracy, AccuracySettings
from gistkit.zoo.resnet import BasicBlock, ResNet

pytestmark = pytest.mark.gpu
BATCH = 16


def network():
    torch.manual_seed(0)
    return nn.Sequential(ResNet(BasicBlock, (1, 1, 1), 64), nn.Dropout(0.3), nn.Linear(64, 10)).cuda().train()


def chain(dropout=0.0):
    torch.manual_seed(0)
    layers = [layer for n in (3, 32, 32, 32, 32) for layer in (nn.Conv2d(n, 32, 3, padding=1), nn.GELU())]
    return nn.Sequential(*layers, nn.Dropout(dropout), nn.Flatten(), nn.Linear(32 * 32 * 32, 10)).cuda().train()


def batch(seed):
    drawn = torch.Generator().manual_seed(seed)
    x, targets = torch.randn(BATCH, 3, 32, 32, generator=drawn), torch.randint(10, (BATCH,), generator=drawn)
    return x.cuda(), targets.cuda()


def results(model, step, some, clear=True):
    if clear:
        model.zero_grad()
    torch.manual_seed(7)
    loss = step(*some)
    return [loss.clone(), *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]


def eager(model, loss_fn=F.cross_entropy):
    return lambda x, targets: gistkit.step(model, loss_fn, x, targets)


def pair(made, loss_fn=F.cross_entropy, **plan):
    """Two equal models under one plan (none: gistkit's own), one stepped as it is, one captured."""
    models = [made(), made()]
    if plan:
        words = {"loss_fn": loss_fn, "measure": False, "cuda_graph": True}
        if less := plan.pop("less", 0):  # bytes, than plain's
            plan["budget"] = gistkit.plan(models[0], *batch(1), policy="plain", **words).peak_bytes - less
        found = gistkit.plan(models[0], *batch(1), **words, **plan)
    for model in models:
        gistkit.compress(model, found if plan else None)
    steps = eager(models[0], loss_fn), gistkit.GraphedStep(models[1], loss_fn)
    for _ in range(graphed.WARM_UP):
        for model, step in zip(models, steps, strict=True):
            results(model, step, batch(1))
    return models, steps


def mean_loss(out, targets):
    return F.cross_entropy(out, targets, reduction="none").mean()


WAYS = {
    "gistkit's own": (network, F.cross_entropy, {}),
    "reruns": (chain, F.cross_entropy, {"policy": "checkpoint"}),
    "budget": (chain, F.cross_entropy, {"less": 9_000_000}),
    "sub-batches": (chain, mean_loss, {"less": 15_000_000, "fidelity": "reassociated"}),
    "fp8s": (network, F.cross_entropy, {"lossy": "fp8s", "policy": "gist"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_replay_has_the_bits_of_a_step(way):
    made, loss_fn, plan = WAYS[way]
    models, steps = pair(made, loss_fn, **plan)
    assert way != "sub-batches" or compressed_forward(models[1]).engine.plan.sub_batches > 1
    for seed in (1, 2, 3):
        found = [results(model, step, batch(seed)) for model, step in zip(models, steps, strict=True)]
        assert all(map(torch.equal, *found)), seed
    assert steps[1].graph_bytes > 0
    report = gistkit.report(models[1])
    assert report.kept_bytes < report.plain_kept_bytes
    taken = [results(model, eager(model, loss_fn), batch(2)) for model in models]  # without it, after the capture
    assert all(map(torch.equal, *taken))


@pytest.mark.parametrize("lossy", [None, "fp8", "int4s"])
def test_a_plain_loop_can_be_captured_by_hand(lossy):
    model, some = gistkit.compress(network(), lossy=lossy, sparse=False), batch(1)

    def step(x, targets):
        loss = F.cross_entropy(model(x), targets)
        loss.backward()
        return loss.detach()

    for _ in range(6):  # beyond the fifth, after which the plan is made anew by measured densities
        results(model, step, some)
    expected = results(model, step, batch(2))[:-2]
    x, targets = (t.clone() for t in some)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(x, targets)
    for static, t in zip((x, targets), batch(2), strict=True):
        static.copy_(t)
    torch.manual_seed(7)
    graph.replay()
    assert all(map(torch.equal, [loss, *(p.grad for p in model.parameters())], expected))


def test_gradients_add_up_over_calls():
    models, steps = pair(network)
    for clear, seed in ((True, 1), (False, 2), (False, 3), (True, 1)):
        found = [results(model, step, batch(seed), clear) for model, step in zip(models, steps, strict=True)]
        assert all(map(torch.equal, *found)), seed
    for model in models:
        model.zero_grad(set_to_none=False)
    found = [results(model, step, batch(2), False) for model, step in zip(models, steps, strict=True)]
    assert all(map(torch.equal, *found))


def test_an_earlier_graph_in_garbage_does_not_end_within_a_capture():
    thresholds = gc.get_threshold()
    try:
        for _ in range(3):
            models, steps = pair(network)
            found = [results(model, step, batch(2)) for model, step in zip(models, steps, strict=True)]
            assert all(map(torch.equal, *found))
            models.append(steps)
            steps[1].cycle = models
            gc.set_threshold(50, 2, 2)
            del models, steps
    finally:
        gc.set_threshold(*thresholds)


def test_an_optimizer_trains_with_it():
    models, steps = pair(chain, less=9_000_000)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    losses = []
    for seed in range(8):
        for step, optimizer in zip(steps, optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(step(*batch(seed)))
            optimizer.step()
    assert all(map(torch.equal, losses[::2], losses[1::2]))
    assert all(map(torch.equal, *(m.parameters() for m in models)))


def test_a_step_of_another_kind_is_refused():
    (_, model), (_, step) = pair(network)
    x, targets = batch(1)
    step(x, targets)
    with pytest.raises(ValueError, match=r"\(16, 3, 32, 32\).*got \(\(8, 3, 32, 32\)"):
        step(x[:8], targets[:8])
    with torch.autocast("cuda", torch.bfloat16), pytest.raises(ValueError, match="must be called with"):
        step(x, targets)
    model.eval()
    with pytest.raises(ValueError, match=r"must find the modules .* got model.training=False"):
        step(x, targets)
    model.train()
    step(x, targets)
    model[2].weight.data = model[2].weight.data.clone()
    with pytest.raises(ValueError, match="some have moved"):
        step(x, targets)


def test_a_step_that_waits_for_the_device_is_refused():
    model = gistkit.compress(network())
    step = gistkit.GraphedStep(model, lambda out, t: F.cross_entropy(out, t) * abs(out.sum().item()))
    for _ in range(graphed.WARM_UP - 1):
        step(*batch(1))
    grads = [p.grad for p in model.parameters()]
    with pytest.raises(GistError, match=r"must not wait for the device, and this one does; leave out \.item"):
        step(*batch(1))
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    step = gistkit.GraphedStep(model, F.cross_entropy)
    found = [step(*batch(1)) for _ in range(graphed.WARM_UP + 2)]
    assert found[-1].isfinite()


def test_what_a_graph_cannot_hold_is_refused():
    model = gistkit.compress(network())
    x, targets = batch(1)
    with pytest.raises(PlanMismatchError, match="run a few steps before the capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.add(1)  # a graph of nothing brings a warning
            model(x)
    for made, policy, why in ((network, "vdnn-all", "sends to the host"), (drawing, "checkpoint", "random numbers")):
        model = made()
        words = {"policy": policy, "measure": False, "hardware": "h100-sxm"}
        gistkit.compress(model, gistkit.plan(model, x, targets, loss_fn=F.cross_entropy, **words))
        step = gistkit.GraphedStep(model, F.cross_entropy)
        for _ in range(graphed.WARM_UP):
            step(x, targets)
        with pytest.raises(PlanMismatchError, match=why):
            step(x, targets)


def drawing():
    """Dropout between convolutions, so that segments draw."""
    layers = list(chain())
    return nn.Sequential(*layers[:4], nn.Dropout(0.5), *layers[4:]).cuda().train()


@pytest.mark.parametrize("scheme", ["fp32", "fp8", "int4s", "immediate:fp8", "gradients:fp8"])
def test_trainings_by_graph_are_those_of_single_steps(scheme, tmp_path, monkeypatch):
    words = {"seeds": 1, "epochs": 2, "device": "cuda", "channels_last": True}
    of, found = AccuracySettings("resnet20", schemes=(scheme,), **words), []
    for captures in (True, False):
        if not captures:
            monkeypatch.setattr(graphed.Replayed, "__call__", lambda self, *given: self._work(*given))
        run = Accuracy(of, tmp_path / str(captures))
        run.train(scheme, 0)
        rows = run._records.rows()
        found.append([{k: v for k, v in row.items() if k not in ("seconds", "environment")} for row in rows])
    assert found[0] == found[1] and len(found[0]) == 2
