"""Lightning: a LightningModule that is compressed, and one with a compressed part."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gistkit
from tests.integrations.cases import BATCH, IMAGES, LABELS, assert_same, network

lightning = pytest.importorskip("lightning")
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning:lightning")


class Task(lightning.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net, self.losses = net, []

    def forward(self, images, labels):
        return self.net(images, labels)["loss"]

    def training_step(self, batch, _):
        loss = self(*batch)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, _):
        self.losses.append(self(*batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(task, folder, precision, callbacks=()):
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", precision=precision, default_root_dir=folder, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip
    rows = DataLoader(TensorDataset(IMAGES, LABELS), BATCH)
    trainer.fit(task, rows, rows)
    trainer.save_checkpoint(folder / "task.ckpt")
    return task.losses, task.state_dict()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("part", [lambda task: task, lambda task: task.net])
def test_trains_to_the_same_bits(tmp_path, precision, part):
    task = Task(network())
    gistkit.compress(part(task))
    assert_same(train(Task(network()), tmp_path, precision), train(task, tmp_path, precision))
    report = gistkit.report(part(task))
    assert report.ratio > 1.5 and report.notes == ()
    assert gistkit.report(part(copy.deepcopy(task))).stats is None
    gistkit.restore(part(task))


def test_the_callback_logs_kept_bytes(tmp_path):
    class Seen(lightning.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    rows, task = [], Task(network())
    gistkit.compress(task.net)
    train(task, tmp_path, "32-true", [gistkit.callbacks.for_lightning(task.net), Seen()])
    assert len(rows) == 2
    assert all(0 < row["gistkit/kept_mib"] < row["gistkit/plain_kept_mib"] / 1.5 for row in rows)
