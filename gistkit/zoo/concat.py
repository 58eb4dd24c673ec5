"""Networks whose blocks concatenate branches: SqueezeNet, GoogLeNet."""

from __future__ import annotations

import torch
from torch import nn

from gistkit.zoo.common import is_small, kaiming, relu


def squeezenet(num_classes: int = 1000, image_size: int = 224) -> nn.Module:
    """SqueezeNet 1.0 (Iandola et al., 2016). Input (N, 3, image_size, image_size).

    Names are torchvision's; the initialisation is He's normal one by fan_in, where torchvision's is uniform.
    """
    return _SqueezeNet(num_classes, is_small(image_size))


def googlenet(num_classes: int = 1000, image_size: int = 224) -> nn.Module:
    """GoogLeNet (Szegedy et al., 2015), its main classifier alone. Input (N, 3, image_size, image_size).

    The network of the paper's Table 1: local response norm, no batch norm, true 5x5 convolutions (torchvision's has
    batch norm and 3x3 in their place). The two auxiliary classifiers are left out.
    """
    return _GoogLeNet(num_classes, is_small(image_size))


class _Fire(nn.Module):
    def __init__(self, width_in: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(width_in, squeezed, 1)
        self.squeeze_activation = relu()
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand1x1_activation = relu()
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)
        self.expand3x3_activation = relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.squeeze_activation(self.squeeze(x))
        parts = self.expand1x1_activation(self.expand1x1(x)), self.expand3x3_activation(self.expand3x3(x))
        return torch.cat(parts, 1)


class _SqueezeNet(nn.Module):
    def __init__(self, num_classes: int, small: bool) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 96, 3, padding=1) if small else nn.Conv2d(3, 96, 7, stride=2),
            relu(),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            _Fire(96, 16, 64),
            _Fire(128, 16, 64),
            _Fire(128, 32, 128),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            _Fire(256, 32, 128),
            _Fire(256, 48, 192),
            _Fire(384, 48, 192),
            _Fire(384, 64, 256),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            _Fire(512, 64, 256),
        )
        final = nn.Conv2d(512, num_classes, 1)
        self.classifier = nn.Sequential(nn.Dropout(), final, relu(), nn.AdaptiveAvgPool2d(1))
        # Without batch norm fan_out would not do: a squeeze layer has up to eight inputs an output.
        kaiming(self, mode="fan_in")
        nn.init.normal_(final.weight, 0.0, 0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.flatten(self.classifier(self.features(x)), 1)


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


class _Inception(nn.Module):
    def __init__(self, width_in: int, widths: tuple[int, int, int, int, int, int]) -> None:
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


class _GoogLeNet(nn.Module):
    def __init__(self, num_classes: int, small: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1) if small else nn.Conv2d(3, 64, 7, stride=2, padding=3),
            relu(),
            nn.Identity() if small else nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.LocalResponseNorm(5),
            *(nn.Conv2d(64, 64, 1), relu()),
            *(nn.Conv2d(64, 192, 3, padding=1), relu()),
            nn.LocalResponseNorm(5),
            nn.MaxPool2d(3, 2, ceil_mode=True),
        )
        width = 192
        self.blocks = nn.Sequential()
        for name, widths in _INCEPTIONS.items():
            if widths is None:
                block = nn.MaxPool2d(3, 2, ceil_mode=True)
            else:
                block = _Inception(width, widths)
                width = block.width_out
            self.blocks.add_module(name, block)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.4)
        self.fc = nn.Linear(width, num_classes)
        # Without batch norm fan_out would not do: a reduction has up to thirty inputs an output.
        kaiming(self, linear_std=0.01, mode="fan_in")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.avgpool(self.blocks(self.stem(x)))
        return self.fc(self.dropout(torch.flatten(x, 1)))
