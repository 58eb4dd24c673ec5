"""Captured training steps of the zoo's networks, in their small-image form unless the size says otherwise."""

import torch

from gistkit import zoo
from gistkit.capture.entry import capture


def of_zoo(name, batch=8, size=32):
    """The step of a network of ten classes on ``batch`` images of ``size`` pixels, on the meta device."""
    with torch.device("meta"):
        model = getattr(zoo, name)(num_classes=10, image_size=size)
        return capture(model, (torch.empty(batch, 3, size, size),), backward=True)
