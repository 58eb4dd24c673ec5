"""The hardware that a plan is for: a given one, or the device that the model is on.

A CUDA card has the rates of its last calibration on this machine (``gistkit calibrate``), else those of its preset; a
card without either is measured, once. None is planned at another card's rates. ``Plan.hardware`` names it,
``Plan.prediction.rates`` says where its rates are from.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch.utils._pytree import tree_flatten

from gistkit.planning.cost import CUDA_LIBRARIES_BYTES, PRESETS, Hardware, preset_name
from gistkit.planning.cost import hardware as find_hardware
from gistkit.profiling import calibrated, kept_calibration


def hardware_of(
    caller: str, model: torch.nn.Module, batch: tuple, which: Hardware | str | Path | None = None
) -> Hardware:
    """The given hardware, or that of the device that the model (without parameters: the batch) is on.

    A CUDA card without a preset is measured at the first call (a few seconds). Raises ValueError for what is on the
    meta device or on one without a preset, as no device is meant then, and for a card that cannot be measured.
    """
    if which is not None:
        return find_hardware(which)
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [t for t in tree_flatten(batch)[0] if isinstance(t, torch.Tensor)]
    device = tensors[0].device
    if device.type == "cpu":
        return PRESETS["cpu"]
    if device.type == "cuda" and torch.cuda.is_available():
        return card_at_hand(device)
    raise ValueError(
        f"{caller}: hardware must be given for a model on device {str(device)!r}, which says nothing of the machine it "
        f"will train on; pass hardware='h200', another of {', '.join(PRESETS)}, or a file of `gistkit calibrate`"
    )


def card_at_hand(device: torch.device) -> Hardware:
    """The hardware of a CUDA device of this machine, with the memory that it really has."""
    found = torch.cuda.get_device_properties(device)
    kept = kept_calibration(found.name)
    if kept is not None:
        return replace(kept, memory_bytes=found.total_memory)
    return card(found.name, found.total_memory) or calibrated(device)


def card(name: str, memory_bytes: int) -> Hardware | None:
    """The preset of a CUDA card by its name, with its own memory and what PyTorch's libraries take; None without one.

    PyTorch tells no convolution its algorithm, on a card of the papers either."""
    preset = preset_name(name)
    if preset is None:
        return None
    own = {"memory_bytes": memory_bytes, "libraries_bytes": CUDA_LIBRARIES_BYTES, "tells_algorithms": False}
    return replace(PRESETS[preset], **own)
