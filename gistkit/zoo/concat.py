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
