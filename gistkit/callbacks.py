"""Kept and peak bytes in the logs of other libraries' training loops.

transformers.Trainer(model=model, callbacks=[gistkit.callbacks.for_trainer(model)], ...)   # state.log_history
lightning.Trainer(callbacks=[gistkit.callbacks.for_lightning(task.net)])                   # the task's loggers
accelerator.log(gistkit.callbacks.memory_figures(model), step=step)                        # its trackers
"""

from __future__ import annotations

from typing import Any

import torch

from gistkit.report import CompiledReport, report

MIB = 2**20
PREFIX = "gistkit/"


def memory_figures(model: torch.nn.Module) -> dict[str, float]:
    """What the last training step kept for backward, in MiB, by the names that loggers show.

    ``gistkit/kept_mib`` is there after the first training forward, ``gistkit/plain_kept_mib``, what plain PyTorch
    keeps, where that is known. ``gistkit/peak_mib`` is the most that the CUDA allocator has handed out since the last
    call, of this model or not; it is left out on a CPU. Does not wait for the device. Raises CompressError where the
    model is not compressed.
    """
    of_model = report(model)
    figures = {"kept_mib": of_model.kept_bytes, "plain_kept_mib": of_model.plain_kept_bytes}
    if isinstance(of_model, CompiledReport) and not of_model.graphs:
        figures = {}  # nothing is known of graphs that PyTorch's caches had
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    if device.type == "cuda":
        figures["peak_mib"] = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    return {PREFIX + name: nbytes / MIB for name, nbytes in figures.items() if nbytes is not None}


def for_trainer(model: torch.nn.Module) -> Any:
    """A ``transformers.TrainerCallback`` that adds :func:`memory_figures` to every row of training that Trainer logs.

    ``model`` is the compressed model or the part of it that is compressed. Raises ImportError without transformers.
    """
    from transformers import TrainerCallback

    class Memory(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            """The figures in the row of the history, and in what later callbacks see."""
            if logs is not None and "loss" in logs:
                figures = memory_figures(model)
                logs.update(figures)
                state.log_history[-1].update(figures)

    return Memory()


def for_lightning(model: torch.nn.Module) -> Any:
    """A Lightning ``Callback`` that logs :func:`memory_figures` after every training batch, as the task logs.

    ``model`` is the compressed task or the part of it that is compressed. Raises ImportError without lightning.
    """
    from lightning.pytorch import Callback

    class Memory(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            """The figures by the task's loggers, and in ``trainer.callback_metrics``."""
            pl_module.log_dict(memory_figures(model))

    return Memory()
