"""Lightning: a LightningModule that is compressed, and one with a compressed part."""

import copy
from functools import cache

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gistkit
from tests.integrations.cases import BATCH, IMAGES, LABELS, assert_same, network

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning:lightning")


@cache
def library():
    """Here, and not where tests are collected: it takes seconds."""
    return pytest.importorskip("lightning")


def task(net):
    """The network as a LightningModule, which keeps its losses."""

    class Task(library().LightningModule):
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

    return Task(net)


def train(model, folder, precision, callbacks=()):
    trainer = library().Trainer(
        max_epochs=2, accelerator="cpu", precision=precision, default_root_dir=folder, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip
    rows = DataLoader(TensorDataset(IMAGES, LABELS), BATCH)
    trainer.fit(model, rows, rows)
    trainer.save_checkpoint(folder / "task.ckpt")
    return model.losses, model.state_dict()


@pytest.mark.parametrize(
    ("precision", "part"), [("32-true", lambda model: model), ("bf16-mixed", lambda model: model.net)]
)
def test_trains_to_the_same_bits(tmp_path, precision, part):
    model = task(network())
    gistkit.compress(part(model))
    assert_same(train(task(network()), tmp_path, precision), train(model, tmp_path, precision))
    report = gistkit.report(part(model))
    assert report.ratio > 1.5 and report.notes == ()
    assert gistkit.report(part(copy.deepcopy(model))).stats is None
    gistkit.restore(part(model))


def test_the_callback_logs_kept_bytes(tmp_path):
    class Seen(library().Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    rows, model = [], task(network())
    gistkit.compress(model.net)
    train(model, tmp_path, "32-true", [gistkit.callbacks.for_lightning(model.net), Seen()])
    assert len(rows) == 2
    assert all(0 < row["gistkit/kept_mib"] < row["gistkit/plain_kept_mib"] / 1.5 for row in rows)
