"""What the runtime does while a CUDA graph is captured, told by a stand-in for the question whether one is."""

from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

import gistkit
from gistkit.codecs import CODECS
from gistkit.errors import PlanMismatchError
from gistkit.runtime import engine
from gistkit.runtime.sparse_sizes import exact
from gistkit.runtime.sparse_sizes.exact import ExactPacker
from gistkit.zoo.resnet import BasicBlock, ResNet

X, TARGETS = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(4)


def network():
    torch.manual_seed(0)
    return ResNet(BasicBlock, (1, 1, 1), 10).train()


@pytest.fixture
def captured(monkeypatch):
    return lambda: monkeypatch.setattr(engine, "capturing", lambda: True)


def test_a_first_step_is_refused(captured):
    model = gistkit.compress(network())
    captured()
    with pytest.raises(PlanMismatchError, match="got the capture of a CUDA graph; run a few steps before the capture"):
        model(X)


def test_a_plan_that_sends_to_the_host_is_refused(captured):
    model = network()
    plan = gistkit.plan(model, X, TARGETS, loss_fn=F.cross_entropy, policy="vdnn-all", hardware="h100-sxm")
    gistkit.compress(model, plan)
    F.cross_entropy(model(X), TARGETS).backward()
    captured()
    with pytest.raises(PlanMismatchError, match=r"sends to the host storage .*run the steps without a graph"):
        model(X)


def test_later_steps_go_on_by_the_plan_that_is_there(captured):
    model = gistkit.compress(network())
    for _ in range(2):
        F.cross_entropy(model(X), TARGETS).backward()
    kept = gistkit.report(model).kept_bytes
    captured()
    for _ in range(5):  # among them those after which plans are made anew
        F.cross_entropy(model(X), TARGETS).backward()
    assert gistkit.report(model).kept_bytes == kept


def test_nothing_sparse_is_encoded_and_no_count_is_read(monkeypatch):
    packer, x = ExactPacker(transport=Mock()), X.relu()
    assert packer.encode(CODECS["zvc"], x).pending
    monkeypatch.setattr(exact, "capturing", lambda: True)
    assert packer.encode(CODECS["zvc"], x) is None and packer.encode(CODECS["fp8"], x).nbytes == x.numel()
    packer.listen()
    packer.settle_first()
    assert packer.poll() == 0


@pytest.mark.parametrize("lossy", [None, True])
def test_without_sparse_forms_no_storage_is_sparse(lossy):
    made = {}
    for sparse in (True, False):
        model = gistkit.compress(network(), lossy=lossy, sparse=sparse)
        for _ in range(6):  # beyond the fifth step, after which measured densities make the plan anew
            F.cross_entropy(model(X), TARGETS).backward()
        made[sparse] = {row.codec for row in gistkit.report(model).stats.rows}
    assert not any(name.startswith(("zvc", "csr")) for name in made[False])
    assert lossy is True or any(name.startswith(("zvc", "csr")) for name in made[True])
    assert ("int4s" in made[False]) is (lossy is True)
