"""A network on a batch of images, as ``gistkit plan`` and ``gistkit profile`` take it: on the meta device."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from gistkit.captured import card, step_on
from gistkit.commands.wrong import InputError
from gistkit.errors import CaptureError
from gistkit.graph.saved import SavedGraph
from gistkit.graph.traced import loss_of
from gistkit.plan.hardware import PRESETS, Hardware
from gistkit.plan.hardware import hardware as find_hardware
from gistkit.plots import check_plot
from gistkit.zoo import load

DEFAULT_CARD = "h200"


def add_images(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that both commands have."""
    what = "of gistkit.zoo (vgg16, resnet50, ...) or package.module:factory"
    parser.add_argument("model", metavar="MODEL", help=what)
    parser.add_argument("--batch", type=int, metavar="N", default=64, help="images a step")
    parser.add_argument("--image-size", type=int, metavar="N", default=224, help="height and width of the images")
    known = f"{', '.join(PRESETS)} or a file of gistkit calibrate (default: this machine's GPU, else {DEFAULT_CARD})"
    parser.add_argument("--hardware", metavar="NAME", default=argparse.SUPPRESS, help=known)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything for machines")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the memory over one step")


def prepare(options: argparse.Namespace) -> Hardware:
    """The hardware that is meant, when everything that can be wrong with files and numbers has been looked at."""
    for name in ("batch", "image_size"):
        if getattr(options, name) < 1:
            raise InputError(f"{name} must be at least 1, got {getattr(options, name)}")
    try:
        if options.plot:
            check_plot(options.plot)
        for path in filter(None, (options.json, options.plot)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        if "hardware" in options:
            return find_hardware(options.hardware)
    except (ValueError, OSError) as error:
        raise InputError(error) from error
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        return card(found.name, found.total_memory)
    return PRESETS[DEFAULT_CARD]


def image_step(options: argparse.Namespace, hardware: Hardware) -> SavedGraph:
    """The captured step of the model on a batch of images, its loss the cross entropy of labels."""
    size = options.image_size
    images = torch.empty(options.batch, 3, size, size, device="meta")
    try:
        return step_on(options.command, _network(options.model, size), (images,), _loss, hardware)[0]
    except (ValueError, TypeError, CaptureError) as error:
        raise InputError(error) from error


def _network(name: str, size: int) -> torch.nn.Module:
    """The network without memory for its parameters, where its factory can do without."""
    try:
        with torch.device("meta"):
            return load(name, image_size=size)
    except (RuntimeError, NotImplementedError):
        return load(name, image_size=size)


def _loss(out: Any) -> torch.Tensor:
    """Cross entropy with a label for every image, or every pixel; without class scores, the sum of all outputs."""
    if not isinstance(out, torch.Tensor) or out.dim() < 2:
        return loss_of(out, (), None)
    return F.cross_entropy(out, torch.zeros(out.shape[0], *out.shape[2:], dtype=torch.long, device=out.device))


__all__ = ["add_images", "image_step", "prepare"]
