"""What the networks share: the small-image rule, initialisation, the in-place ReLU."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn

SMALL_IMAGE = 64
LEAST_IMAGE = 32


def is_small(image_size: int) -> bool:
    """Whether a network for this image size takes its small-image form; ValueError below 32."""
    require(image_size, LEAST_IMAGE)
    return image_size <= SMALL_IMAGE


def require(image_size: int, least: int, name: str = "") -> None:
    """ValueError where ``image_size`` is no int of at least ``least``, the network ``name``'s own if given."""
    if type(image_size) is not int or image_size < least:
        whose = f" for {name}" if name else ""
        raise ValueError(f"image_size must be at least {least}{whose}, got {image_size!r}; resize the images")


def require_classes(num_classes: int) -> None:
    """ValueError where ``num_classes`` is no int of at least 1."""
    if type(num_classes) is not int or num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, got {num_classes!r}; pass the number of labels")


def kaiming(model: nn.Module, linear_std: float | None = None, mode: Literal["fan_in", "fan_out"] = "fan_out") -> None:
    """He et al. (2015) as torchvision applies it: convolutions by ``mode``, zero biases, unit batch norm."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear) and linear_std is not None:
            nn.init.normal_(module.weight, 0.0, linear_std)
            nn.init.zeros_(module.bias)


@torch.no_grad()
def centre(model: nn.Module) -> None:
    """Take every convolution filter's mean out, and enlarge what is left so that ReLUs keep the variance (Brock, De and
    Smith, 2021, "Characterizing signal propagation": scaled weight standardisation, here once and not in every step).

    Without batch norm, deep layers see the mean of all images and little else: behind VGG-16's convolutions two digits
    have a cosine of 0.985 by He's initialisation alone, and of 0.90 by this one, which learns in half the steps.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            weight = module.weight
            weight.sub_(weight.mean((1, 2, 3), keepdim=True)).mul_((1 - 1 / math.pi) ** -0.5)


def relu() -> nn.Module:
    """torchvision's ReLU: in place."""
    return nn.ReLU(inplace=True)


def vgg_features(depths: tuple[int, ...], padding: int = 1, ceil_mode: bool = False) -> nn.Sequential:
    """VGG's five groups of so many 3x3 convolutions with a max-pool behind each; ``padding`` of the first."""
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in zip((64, 128, 256, 512, 512), depths, strict=True):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1 if layers else padding), relu()]
            channels = width
        layers.append(nn.MaxPool2d(2, 2, ceil_mode=ceil_mode))
    return nn.Sequential(*layers)
