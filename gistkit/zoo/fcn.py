"""A fully convolutional network: a label for every pixel."""

from __future__ import annotations

import torch
from torch import nn

from gistkit.zoo.common import LEAST_IMAGE, kaiming, relu, require, vgg_features


def fcn(num_classes: int = 21, image_size: int = 500) -> nn.Module:
    """FCN-32s on VGG-16 (Long, Shelhamer and Darrell, 2015). Input (N, 3, H, W), output (N, num_classes, H, W).

    The paper trains on PASCAL VOC: 21 classes, images of about 500 pixels. As there, the first convolution pads by 100,
    so that every image of ``image_size`` 32 and up gives a score to upsample, and the result is cropped by 19 at the
    top and left. ValueError below 32.
    """
    require(image_size, LEAST_IMAGE, "fcn")
    return _FCN32s(num_classes)


class _FCN32s(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = vgg_features((2, 2, 3, 3, 3), padding=100, ceil_mode=True)
        self.fc6, self.fc7 = nn.Conv2d(512, 4096, 7), nn.Conv2d(4096, 4096, 1)
        self.relu, self.drop = relu(), nn.Dropout2d()
        self.score = nn.Conv2d(4096, num_classes, 1)
        self.upscore = nn.ConvTranspose2d(num_classes, num_classes, 64, stride=32, bias=False)
        kaiming(self)
        with torch.no_grad():
            self.upscore.weight.copy_(_bilinear(num_classes, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[-2:]
        x = self.features(x)
        x = self.drop(self.relu(self.fc6(x)))
        x = self.drop(self.relu(self.fc7(x)))
        x = self.upscore(self.score(x))
        return x[..., 19 : 19 + height, 19 : 19 + width].contiguous()


def _bilinear(channels: int, size: int) -> torch.Tensor:
    """[channels, channels, size, size]: a transposed convolution that interpolates every channel by itself."""
    ramp = 1 - (torch.arange(size) - (size - 1) / 2).abs() / (size / 2)
    weight = torch.zeros(channels, channels, size, size)
    weight[range(channels), range(channels)] = ramp[:, None] * ramp[None, :]
    return weight
