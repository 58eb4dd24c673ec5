"""A network on a batch of images, as ``gistkit plan`` and ``gistkit profile`` take it: on the meta device, and on the
one at hand where a step is measured."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from gistkit.api import captured, may_be_cut, read_times
from gistkit.capture import loss_of
from gistkit.commands.wrong import HERE, InputError, claim, input_errors, write
from gistkit.errors import quoted
from gistkit.ir import SavedGraph
from gistkit.planning.cost import PRESETS, Hardware, StepTimes
from gistkit.planning.cost import hardware as find_hardware
from gistkit.profiling import card_at_hand
from gistkit.zoo import load

DEFAULT_CARD = "h200"
MOST = 2**24
WIDE = 100
"""Columns from which tables show the kinds of layers and the reasons of decisions too."""


def add_images(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that both commands have."""
    what = "of gistkit.zoo (vgg16, resnet50, ...) or package.module:factory"
    parser.add_argument("model", metavar="MODEL", help=what)
    parser.add_argument("--batch", type=int, metavar="N", default=64, help="images a step")
    parser.add_argument("--image-size", type=int, metavar="N", default=224, help="height and width of the images")
    parser.add_argument("--classes", type=int, metavar="N", default=1000, help="that the network tells apart")
    known = f"{', '.join(PRESETS)} or a file of gistkit calibrate"
    default = f"default: this machine's GPU, else {DEFAULT_CARD}; for measured times their device"
    parser.add_argument("--hardware", metavar="NAME", default=argparse.SUPPRESS, help=f"{known} ({default})")
    parser.add_argument("--measure", action="store_true", help="seconds of a real step on this device, task by task")
    text = "of measured times: written with --measure, read without"
    parser.add_argument("--times", metavar="FILE.json", type=Path, help=text)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything for machines, making folders")


def prepare(options: argparse.Namespace) -> Hardware:
    """Check the files and numbers among the options; the hardware to plan for."""
    for name in ("batch", "image_size", "classes"):
        value = getattr(options, name)
        if not 1 <= value <= MOST:
            raise InputError(f"{name} must be from 1 to {MOST}, got {quoted(value)}; leave it out for the default")
    claim(options.json, options.times if options.measure else None, plot=getattr(options, "plot", None))
    with input_errors(ValueError):
        if "hardware" in options:
            return find_hardware(options.hardware)
        if options.measure:
            return _at_hand() or PRESETS["cpu"]
        if options.times and read_times(options.command, options.times).device == "cpu":
            return PRESETS["cpu"]
    return _at_hand() or PRESETS[DEFAULT_CARD]


def _at_hand() -> Hardware | None:
    return card_at_hand(torch.device("cuda", 0)) if torch.cuda.is_available() else None


def image_step(
    options: argparse.Namespace, hardware: Hardware, per_sub_batch_norm: bool = False, *, cut: bool = False
) -> tuple[SavedGraph, StepTimes | None]:
    """The captured step of the model on a batch of images, its loss the cross entropy of labels; its measured times
    where the options ask for them. ``cut``: it is to be planned in sub-batches, too."""
    with input_errors():
        model, images = _network(options)
        graph, _, times = captured(
            *(options.command, model, (images,), _loss, hardware, options.measure or options.times or False),
            cut=lambda graph: cut and may_be_cut(graph, per_sub_batch_norm),
            engines=bool(getattr(options, "fidelity", "") != "bitwise" or options.lossy),
        )
    if options.measure and options.times:
        assert times is not None
        write(options.times, times.to_json() + "\n")
    return graph, times


def _network(options: argparse.Namespace) -> tuple[torch.nn.Module, torch.Tensor]:
    """The network and random images; without memory where nothing runs and the factory can do without."""
    size, classes = options.image_size, options.classes
    if options.measure:
        with torch.device(HERE):
            return load(options.model, classes, size).to(HERE), torch.randn(options.batch, 3, size, size)
    images = torch.empty(options.batch, 3, size, size, device="meta")
    try:
        with torch.device("meta"):
            return load(options.model, classes, size), images
    except Exception:  # of the factory's own, or of what the meta device lacks: without it the error is the factory's
        return load(options.model, classes, size), images


def _loss(out: Any) -> torch.Tensor:
    """Cross entropy with a label for every image, or every pixel; without class scores, the sum of all outputs."""
    if not isinstance(out, torch.Tensor) or out.dim() < 2:
        return loss_of(out, (), None)
    return F.cross_entropy(out, torch.zeros(out.shape[0], *out.shape[2:], dtype=torch.long, device=out.device))
