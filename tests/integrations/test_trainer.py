"""Hugging Face's Trainer: it reads the forward's signature, and wraps the forward where precision is mixed."""

import inspect

import pytest
from torch.utils.data import Dataset

import gistkit
from tests.integrations.cases import BATCH, IMAGES, LABELS, Net, assert_same, network


class Rows(Dataset):
    """Rows as Trainer takes them, with a column that the model does not."""

    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, i):
        return {"images": IMAGES[i], "labels": int(LABELS[i]), "path": float(i)}


def train(model, folder, callbacks=(), **options):
    """Losses of training and evaluation, and the state dict."""
    # here, and not where tests are collected: it takes seconds
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=folder, num_train_epochs=2, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[],
        logging_steps=1, disable_tqdm=True, eval_strategy="epoch", **options,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=list(callbacks)
    )
    trainer.train()
    trainer.save_model()
    found = [row[key] for row in trainer.state.log_history for key in ("loss", "eval_loss") if key in row]
    return found, model.state_dict()


def seen():
    """A callback that keeps the rows that later callbacks are shown."""

    class Seen(pytest.importorskip("transformers").TrainerCallback):
        def __init__(self):
            self.rows = []

        def on_log(self, args, state, control, logs=None, **_):
            self.rows.append((dict(logs), dict(state.log_history[-1])))

    return Seen()


def test_the_callback_logs_kept_bytes_with_every_loss(tmp_path):
    model, rows = gistkit.compress(network()), seen()
    train(model, tmp_path, [gistkit.callbacks.for_trainer(model), rows])
    trained = [shown for shown in rows.rows if "loss" in shown[0]]
    assert len(trained) == 8
    for row in (row for shown in trained for row in shown):
        assert 0 < row["gistkit/kept_mib"] < row["gistkit/plain_kept_mib"] / 1.5
        assert "gistkit/peak_mib" not in row
    assert not [s for s in rows.rows if "eval_loss" in s[0] and "gistkit/kept_mib" in s[0]]


@pytest.mark.parametrize("options", [{}, {"bf16": True, "gradient_accumulation_steps": 2}])
def test_trains_to_the_same_bits(tmp_path, options):
    model = gistkit.compress(network())
    assert_same(train(network(), tmp_path, **options), train(model, tmp_path, **options))
    report = gistkit.report(model)
    assert report.ratio > 1.5 and report.notes == ()
    assert inspect.signature(model.forward) == inspect.signature(Net().forward)
    with pytest.raises(gistkit.errors.CompressError, match="compressed already"):
        gistkit.compress(model)
    gistkit.restore(model)
    with pytest.raises(gistkit.errors.CompressError, match="not compressed"):
        gistkit.report(model)
