"""Networks without branches: VGG (also as deep as vDNN makes it: Rhu et al., 2016), AlexNet, NiN, OverFeat."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn

from gistkit.zoo.common import centre, is_small, kaiming, relu, require, vgg_features

OVERFEAT_LEAST_IMAGE = 71


def alexnet(num_classes: int = 1000, image_size: int = 224) -> nn.Module:
    """AlexNet (Krizhevsky, 2014: one tower). Input (N, 3, image_size, image_size)."""
    return _AlexNet(num_classes, is_small(image_size))


def nin(num_classes: int = 1000, image_size: int = 224) -> nn.Module:
    """Network in Network (Lin, Chen and Yan, 2014). Input (N, 3, image_size, image_size)."""
    layers = _nin_small(num_classes) if is_small(image_size) else _nin_large(num_classes)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    kaiming(model)
    return model


def overfeat(num_classes: int = 1000, image_size: int = 231) -> nn.Module:
    """OverFeat's fast model (Sermanet et al., 2014, Table 1). Input (N, 3, image_size, image_size), 231 in the paper.

    It has no small-image form: ValueError below 71, where its pools leave nothing. Other sizes than 231 are pooled to
    the 6x6 that the classifier reads.
    """
    require(image_size, OVERFEAT_LEAST_IMAGE, "overfeat")
    return _OverFeat(num_classes)


class _VGG(nn.Module):
    def __init__(self, depths: tuple[int, ...], num_classes: int, small: bool) -> None:
        super().__init__()
        pooled, units = (1, 512) if small else (7, 4096)
        self.features = vgg_features(depths)
        self.avgpool = nn.AdaptiveAvgPool2d(pooled)
        hidden = [nn.Linear(units, units), relu(), nn.Dropout()] if pooled > 1 else []
        self.classifier = nn.Sequential(
            nn.Linear(512 * pooled**2, units), relu(), nn.Dropout(), *hidden, nn.Linear(units, num_classes)
        )
        if small:
            # torchvision's 0.01 is for 4096 units; with 512 inputs it would shut off the gradient.
            kaiming(self, linear_std=512**-0.5, mode="fan_in")
            centre(self)
        else:
            kaiming(self, linear_std=0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def _vgg(name: str, depths: tuple[int, ...], text: str) -> Callable[..., nn.Module]:
    """The function that builds a VGG."""

    def make(num_classes: int = 1000, image_size: int = 224) -> nn.Module:
        return _VGG(depths, num_classes, is_small(image_size))

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"{text} Input (N, 3, image_size, image_size)."
    return make


_DEEP = "VGG-16 with {} more convolutions in each of its five groups (vDNN)."
vgg16 = _vgg("vgg16", (2, 2, 3, 3, 3), "VGG-16 (Simonyan and Zisserman, 2015; configuration D, no batch norm).")
vgg19 = _vgg("vgg19", (2, 2, 4, 4, 4), "VGG-19 (Simonyan and Zisserman, 2015; configuration E, no batch norm).")
# moDNN says only that it increased the convolutions of VGG-19; here the new ones are spread over the five groups as
# evenly as they go, the two that are left over in the last groups.
vgg101 = _vgg("vgg101", (18, 18, 20, 21, 21), "VGG-19 with 82 more convolutions (moDNN, section V).")
vgg116 = _vgg("vgg116", (22, 22, 23, 23, 23), _DEEP.format(20))
vgg216 = _vgg("vgg216", (42, 42, 43, 43, 43), _DEEP.format(40))
vgg316 = _vgg("vgg316", (62, 62, 63, 63, 63), _DEEP.format(60))
vgg416 = _vgg("vgg416", (82, 82, 83, 83, 83), _DEEP.format(80))


class _AlexNet(nn.Module):
    def __init__(self, num_classes: int, small: bool) -> None:
        super().__init__()
        window = 2 if small else 3
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 64, 11, stride=4, padding=5 if small else 2), relu(), nn.MaxPool2d(window, 2)),
            *(nn.Conv2d(64, 192, 5, padding=2), relu(), nn.MaxPool2d(window, 2)),
            *(nn.Conv2d(192, 384, 3, padding=1), relu()),
            *(nn.Conv2d(384, 256, 3, padding=1), relu()),
            *(nn.Conv2d(256, 256, 3, padding=1), relu(), nn.MaxPool2d(window, 2)),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1 if small else 6)
        if small:
            self.classifier: nn.Module = nn.Linear(256, num_classes)
        else:
            self.classifier = nn.Sequential(
                *(nn.Dropout(), nn.Linear(256 * 36, 4096), relu()),
                *(nn.Dropout(), nn.Linear(4096, 4096), relu()),
                nn.Linear(4096, num_classes),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class _OverFeat(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 96, 11, stride=4), relu(), nn.MaxPool2d(2, 2)),
            *(nn.Conv2d(96, 256, 5), relu(), nn.MaxPool2d(2, 2)),
            *(nn.Conv2d(256, 512, 3, padding=1), relu()),
            *(nn.Conv2d(512, 1024, 3, padding=1), relu()),
            *(nn.Conv2d(1024, 1024, 3, padding=1), relu(), nn.MaxPool2d(2, 2)),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            *(nn.Dropout(), nn.Linear(1024 * 36, 3072), relu()),
            *(nn.Dropout(), nn.Linear(3072, 4096), relu()),
            nn.Linear(4096, num_classes),
        )
        kaiming(self, linear_std=0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def _mlpconv(widths: tuple[int, ...], kernel: int, stride: int = 1, padding: int = 0) -> list[nn.Module]:
    """NiN's micro network: one spatial convolution and 1x1 convolutions, a ReLU after each."""
    layers: list[nn.Module] = [nn.Conv2d(widths[0], widths[1], kernel, stride, padding), relu()]
    for width_in, width_out in itertools.pairwise(widths[1:]):
        layers += [nn.Conv2d(width_in, width_out, 1), relu()]
    return layers


def _nin_large(num_classes: int) -> list[nn.Module]:
    # Caffe rounds pooled sizes up: 54 -> 27 -> 13 -> 6 at 224.
    return [
        *_mlpconv((3, 96, 96, 96), 11, stride=4),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        *_mlpconv((96, 256, 256, 256), 5, padding=2),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        *_mlpconv((256, 384, 384, 384), 3, padding=1),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Dropout(),
        *_mlpconv((384, 1024, 1024, num_classes), 3, padding=1),
    ]


def _nin_small(num_classes: int) -> list[nn.Module]:
    return [
        *_mlpconv((3, 192, 160, 96), 5, padding=2),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Dropout(),
        *_mlpconv((96, 192, 192, 192), 5, padding=2),
        nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.Dropout(),
        *_mlpconv((192, 192, 192, num_classes), 3, padding=1),
    ]
