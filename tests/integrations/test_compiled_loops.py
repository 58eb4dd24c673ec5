"""Other libraries' loops that compile the model, on the CPU: the partitioned graphs run as they are."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gistkit
from tests.integrations.cases import BATCH, BATCHES, IMAGES, LABELS, assert_same, network
from tests.integrations.test_trainer import Rows
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


def by_trainer(model, folder):
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=folder, num_train_epochs=1, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[],
        logging_steps=1, disable_tqdm=True, torch_compile=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows())
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], model.state_dict()


def test_trainer_with_torch_compile(tmp_path):
    model = gistkit.compress(network())
    assert_same(by_trainer(network(), tmp_path), by_trainer(model, tmp_path))
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


def by_lightning(net, folder):
    lightning = pytest.importorskip("lightning")

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = net, []

        def training_step(self, batch, _):
            loss = self.net(*batch)["loss"]
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    task, rows = Task(), DataLoader(TensorDataset(IMAGES, LABELS), BATCH)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=folder, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(task, rows)
    return task.losses, task.state_dict()


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning:lightning")
def test_lightning_with_a_compiled_part(tmp_path):
    net = gistkit.compile(network())
    assert_same(by_lightning(torch.compile(network()), tmp_path), by_lightning(net, tmp_path))
    assert saves(gistkit.report(net))
