"""Networks whose blocks concatenate branches: SqueezeNet, GoogLeNet."""

from __future__ import annotations

import torch
from torch import nn

from gistkit.zoo.common import is_small, kaiming, named, relu


def squeezenet(num_classes: int = 1000, image_size: int = 224) -> nn.Module:
    """SqueezeNet 1.0 (Iandola et al., 2016). Input (N, 3, image_size, image_size).

    Names are torchvision's; the initialisation is He's normal one by fan_in, where torchvision's is uniform.
    """
    features = nn.Sequential(
        nn.Conv2d(3, 96, 3, padding=1) if is_small(image_size) else nn.Conv2d(3, 96, 7, stride=2),
        *(relu(), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(_Fire(96, 16, 64), _Fire(128, 16, 64), _Fire(128, 32, 128), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(_Fire(256, 32, 128), _Fire(256, 48, 192), _Fire(384, 48, 192), _Fire(384, 64, 256)),
        *(nn.MaxPool2d(3, 2, ceil_mode=True), _Fire(512, 64, 256)),
    )
    final = nn.Conv2d(512, num_classes, 1)
    classifier = nn.Sequential(nn.Dropout(), final, relu(), nn.AdaptiveAvgPool2d(1))
    model = named(features=features, classifier=classifier, flatten=nn.Flatten())
    # Without batch norm fan_out would not do: a squeeze layer has up to eight inputs an output.
    kaiming(model, mode="fan_in")
    nn.init.normal_(final.weight, 0.0, 0.01)
    return model


class _Fire(nn.Module):
    def __init__(self, width_in: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze, self.squeeze_activation = nn.Conv2d(width_in, squeezed, 1), relu()
        self.expand1x1, self.expand1x1_activation = nn.Conv2d(squeezed, expanded, 1), relu()
        self.expand3x3, self.expand3x3_activation = nn.Conv2d(squeezed, expanded, 3, padding=1), relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.squeeze_activation(self.squeeze(x))
        parts = self.expand1x1_activation(self.expand1x1(x)), self.expand3x3_activation(self.expand3x3(x))
        return torch.cat(parts, 1)


# Table 1 of Szegedy et al. (2015): 1x1; 3x3 reduce, 3x3; 5x5 reduce, 5x5; pool proj. None is a max-pool.
_INCEPTIONS = {
    "inception3a": (64, 96, 128, 16, 32, 32),
    "inception3b": (128, 128, 192, 32, 96, 64),
    "maxpool3": None,
    "inception4a": (192, 96, 208, 16, 48, 64),
    "inception4b": (160, 112, 224, 24, 64, 64),
    "inception4c": (128, 128, 256, 24, 64, 64),
    "inception4d": (112, 144, 288, 32, 64, 64),
    "inception4e": (256, 160, 320, 32, 128, 128),
    "maxpool4": None,
    "inception5a": (256, 160, 320, 32, 128, 128),
    "inception5b": (384, 192, 384, 48, 128, 128),
}


def googlenet(num_classes: int = 1000, image_size: int = 224) -> nn.Module:
    """GoogLeNet (Szegedy et al., 2015), its main classifier alone. Input (N, 3, image_size, image_size).

    The network of the paper's Table 1: local response norm, no batch norm, true 5x5 convolutions (torchvision's has
    batch norm and 3x3 in their place). The two auxiliary classifiers are left out.
    """
    small = is_small(image_size)
    stem = nn.Sequential(
        *(nn.Conv2d(3, 64, 3, padding=1) if small else nn.Conv2d(3, 64, 7, stride=2, padding=3), relu()),
        *(nn.Identity() if small else nn.MaxPool2d(3, 2, ceil_mode=True), nn.LocalResponseNorm(5)),
        *(nn.Conv2d(64, 64, 1), relu()),
        *(nn.Conv2d(64, 192, 3, padding=1), relu(), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2, ceil_mode=True)),
    )
    width, blocks = 192, nn.Sequential()
    for name, widths in _INCEPTIONS.items():
        block = _Inception(width, widths) if widths else nn.MaxPool2d(3, 2, ceil_mode=True)
        width = getattr(block, "width_out", width)
        blocks.add_module(name, block)
    end = {"flatten": nn.Flatten(), "dropout": nn.Dropout(0.4), "fc": nn.Linear(width, num_classes)}
    model = named(stem=stem, blocks=blocks, avgpool=nn.AdaptiveAvgPool2d(1), **end)
    # Without batch norm fan_out would not do: a reduction has up to thirty inputs an output.
    kaiming(model, linear_std=0.01, mode="fan_in")
    return model


class _Inception(nn.Module):
    def __init__(self, width_in: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        one, reduce3, three, reduce5, five, projected = widths
        self.branch1 = nn.Sequential(nn.Conv2d(width_in, one, 1), relu())
        self.branch2 = nn.Sequential(
            *(nn.Conv2d(width_in, reduce3, 1), relu()), *(nn.Conv2d(reduce3, three, 3, padding=1), relu())
        )
        self.branch3 = nn.Sequential(
            *(nn.Conv2d(width_in, reduce5, 1), relu()), *(nn.Conv2d(reduce5, five, 5, padding=2), relu())
        )
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), nn.Conv2d(width_in, projected, 1), relu())
        self.width_out = one + three + five + projected

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)
