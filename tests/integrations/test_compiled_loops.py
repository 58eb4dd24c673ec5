"""Other libraries' loops that compile the model, on the CPU: the partitioned graphs run as they are."""

import pytest
import torch

import gistkit
from tests.integrations import test_lightning, test_trainer
from tests.integrations.cases import BATCHES, assert_same, network
from tests.support.compiled_cases import graphs_run_as_they_are  # imports Inductor, past its warnings

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with graphs_run_as_they_are():
        yield
    torch._dynamo.reset()


def saves(report):
    assert isinstance(report, gistkit.CompiledReport)
    return report.kept_bytes < report.plain_bytes


def test_trainer_with_torch_compile(tmp_path):
    model = gistkit.compress(network())
    plain, found = (test_trainer.train(m, tmp_path, torch_compile=True) for m in (network(), model))
    assert_same(plain, found)
    assert saves(gistkit.report(model))


def by_accelerate(model):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    plugin = accelerate.utils.TorchDynamoPlugin(backend="inductor")
    accelerator = accelerate.Accelerator(cpu=True, dynamo_plugin=plugin)
    called, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for images, labels in BATCHES:
        loss = called(images, labels)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return losses, model.state_dict()


def test_accelerate_with_a_dynamo_plugin():
    model = gistkit.compress(network())
    assert_same(by_accelerate(network()), by_accelerate(model))
    assert saves(gistkit.report(model))


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning:lightning")
def test_lightning_with_a_compiled_part(tmp_path):
    net = gistkit.compile(network())
    loops = (test_lightning.train(test_lightning.task(n), tmp_path, "32-true") for n in (torch.compile(network()), net))
    assert_same(*loops)
    assert saves(gistkit.report(net))
