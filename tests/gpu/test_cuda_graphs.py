"""Training steps of compressed models, captured into a CUDA graph and replayed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.errors import PlanMismatchError
from gistkit.training import Accuracy, AccuracySettings, graphed
from gistkit.zoo.resnet import BasicBlock, ResNet

pytestmark = pytest.mark.gpu
BATCH = 16


def network():
    torch.manual_seed(0)
    return nn.Sequential(ResNet(BasicBlock, (1, 1, 1), 64), nn.Dropout(0.3), nn.Linear(64, 10)).cuda().train()


def batch(seed):
    drawn = torch.Generator().manual_seed(seed)
    x, targets = torch.randn(BATCH, 3, 32, 32, generator=drawn), torch.randint(10, (BATCH,), generator=drawn)
    return x.cuda(), targets.cuda()


def results(model, step, x, targets):
    model.zero_grad()
    torch.manual_seed(7)
    loss = step(x, targets)
    return [loss.clone(), *(p.grad.clone() for p in model.parameters())]


def graphed_results(model, step, batches):
    """Of replays of one captured step."""
    x, targets = (t.clone() for t in batches[0])
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(x, targets)
    grads = [p.grad for p in model.parameters()]
    found = []
    for some in batches:
        x.copy_(some[0])
        targets.copy_(some[1])
        torch.manual_seed(7)
        graph.replay()
        found.append([t.clone() for t in (loss, *grads)])
    return found


@pytest.mark.parametrize("lossy", [None, "fp8", "int4s"])
def test_a_replay_has_the_bits_of_a_step(lossy):
    model, batches = gistkit.compress(network(), lossy=lossy, sparse=False), [batch(1), batch(2)]

    def step(x, targets):
        loss = F.cross_entropy(model(x), targets)
        loss.backward()
        return loss.detach()

    for _ in range(6):  # beyond the fifth, after which the plan is made anew by measured densities
        results(model, step, *batches[0])
    eager = [results(model, step, *some) for some in batches]
    for expected, found in zip(eager, graphed_results(model, step, batches), strict=True):
        assert all(map(torch.equal, expected, found))
    report = gistkit.report(model)
    assert report.kept_bytes < report.plain_kept_bytes
    assert all(map(torch.equal, eager[0], results(model, step, *batches[0])))  # after the capture, without it


def test_what_a_graph_cannot_hold_is_refused():
    model = gistkit.compress(network())
    x, targets = batch(1)
    with pytest.raises(PlanMismatchError, match="run a few steps before the capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.add(1)  # a graph of nothing brings a warning
            model(x)
    model = network()
    plan = gistkit.plan(model, x, targets, loss_fn=F.cross_entropy, policy="vdnn-all", measure=False)
    gistkit.compress(model, plan)
    F.cross_entropy(model(x), targets).backward()
    with pytest.raises(PlanMismatchError, match="sends to the host"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.add(1)
            model(x)


@pytest.mark.parametrize("scheme", ["fp32", "fp8", "int4s", "immediate:fp8", "gradients:fp8"])
def test_trainings_by_graph_are_those_of_single_steps(scheme, tmp_path, monkeypatch):
    words = {"seeds": 1, "epochs": 2, "device": "cuda", "channels_last": True}
    of, found = AccuracySettings("resnet20", schemes=(scheme,), **words), []
    for eager_steps in (graphed.EAGER_STEPS, 10**9):
        monkeypatch.setattr(graphed, "EAGER_STEPS", eager_steps)
        run = Accuracy(of, tmp_path / str(eager_steps))
        run.train(scheme, 0)
        rows = run._records.rows()
        found.append([{k: v for k, v in row.items() if k not in ("seconds", "environment")} for row in rows])
    assert found[0] == found[1] and len(found[0]) == 2
