"""What the networks share: the small-image rule, initialisation, the in-place ReLU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

from torch import nn

SMALL_IMAGE = 64
LEAST_IMAGE = 32
Make = Callable[..., nn.Module]


def is_small(image_size: int) -> bool:
    """Whether a network for this image size takes its small-image form; ValueError below 32."""
    require("image_size", image_size, LEAST_IMAGE)
    return image_size <= SMALL_IMAGE


def require(name: str, value: int, least: int = 1, network: str = "") -> None:
    """ValueError where an argument is no int of at least ``least``, the network's own limit if it is named."""
    if type(value) is not int or value < least:
        whose = f" for {network}" if network else ""
        remedy = "resize the images" if name == "image_size" else "pass the number of labels"
        raise ValueError(f"{name} must be at least {least}{whose}, got {value!r}; {remedy}")


def network(name: str, text: str, build: Callable[[int, bool], nn.Module], image_size: int = 224) -> Make:
    """The public function of a network that is built from (number of classes, whether the images are small)."""

    def make(num_classes: int = 1000, image_size: int = image_size) -> nn.Module:
        return build(num_classes, is_small(image_size))

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"{text} Input (N, 3, image_size, image_size)."
    return make


def named(**parts: nn.Module) -> nn.Sequential:
    """The parts one after the other, by these names."""
    return nn.Sequential(OrderedDict(parts))


def kaiming(model: nn.Module, linear_std: float | None = None, mode: Literal["fan_in", "fan_out"] = "fan_out") -> None:
    """He et al. (2015) as torchvision applies it: convolutions by ``mode``, zero biases, unit batch norm."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
        elif isinstance(module, nn.Linear) and linear_std is not None:
            nn.init.normal_(module.weight, 0.0, linear_std)
        else:  # a batch norm starts as 1 and 0 as it is
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def relu() -> nn.Module:
    """torchvision's ReLU: in place."""
    return nn.ReLU(inplace=True)
