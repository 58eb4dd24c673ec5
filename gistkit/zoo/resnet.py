"""Residual networks: ResNet-18, -34, -50, -101, -152, and the CIFAR forms with 20 to 1202 layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from gistkit.zoo.common import Make, kaiming, network, relu


class _ZeroPadded(nn.Module):
    """He et al.'s option A: every ``stride``-th pixel, the new channels zero."""

    def __init__(self, width_in: int, width_out: int, stride: int) -> None:
        super().__init__()
        self.stride, self.new_channels = stride, width_out - width_in

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


def _shortcut(width_in: int, width_out: int, stride: int, padded: bool) -> nn.Module | None:
    if stride == 1 and width_in == width_out:
        return None
    if padded:
        return _ZeroPadded(width_in, width_out, stride)
    return nn.Sequential(nn.Conv2d(width_in, width_out, 1, stride=stride, bias=False), nn.BatchNorm2d(width_out))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is ``padded`` (option A) or a projection."""

    expansion = 1

    def __init__(self, width_in: int, width: int, stride: int, padded: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = relu()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(width_in, width, stride, padded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """As :class:`BasicBlock`, of a 3x3 convolution between two 1x1, the last with four times the width."""

    expansion = 4

    def __init__(self, width_in: int, width: int, stride: int, padded: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * 4, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * 4)
        self.relu = relu()
        self.downsample = _shortcut(width_in, width * 4, stride, padded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Stages of so many blocks: four, or three thin ones with option A for CIFAR (He et al., 2016, section 4.2)."""

    def __init__(
        self, block: type[BasicBlock | Bottleneck], depths: tuple[int, ...], num_classes: int, small: bool = True
    ) -> None:
        super().__init__()
        cifar = len(depths) == 3
        width = width_in = 16 if cifar else 64
        kernel, stride = (3, 1) if small or cifar else (7, 2)
        self.conv1 = nn.Conv2d(3, width, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = relu()
        self.maxpool = nn.Identity() if small or cifar else nn.MaxPool2d(3, 2, padding=1)
        self.stages = [f"layer{i}" for i in range(1, 1 + len(depths))]
        for i, (name, depth) in enumerate(zip(self.stages, depths, strict=True)):
            first = block(width_in, width << i, 1 + (i > 0), cifar)
            width_in = (width << i) * block.expansion
            rest = (block(width_in, width << i, 1, cifar) for _ in range(depth - 1))
            self.add_module(name, nn.Sequential(first, *rest))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width_in, num_classes)
        kaiming(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        # one name for all stages: a name of its own would hold the stem's output until the last stage is done
        for name in self.stages:
            x = getattr(self, name)(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


def _resnet(name: str, block: type[BasicBlock | Bottleneck], depths: tuple[int, ...], text: str) -> Make:
    size = 32 if len(depths) == 3 else 224
    return network(name, text, lambda num_classes, small: ResNet(block, depths, num_classes, small), size)


resnet18 = _resnet("resnet18", BasicBlock, (2, 2, 2, 2), "ResNet-18 (He et al., 2016).")
resnet34 = _resnet("resnet34", BasicBlock, (3, 4, 6, 3), "ResNet-34 (He et al., 2016).")
resnet50 = _resnet("resnet50", Bottleneck, (3, 4, 6, 3), "ResNet-50, stride in the 3x3 convolution, as torchvision.")
resnet101 = _resnet("resnet101", Bottleneck, (3, 4, 23, 3), "ResNet-101 (He et al., 2016), strides as in resnet50.")
resnet152 = _resnet("resnet152", Bottleneck, (3, 8, 36, 3), "ResNet-152 (He et al., 2016), strides as in resnet50.")
resnet20 = _resnet("resnet20", BasicBlock, (3, 3, 3), "ResNet-20 for CIFAR-10 (He et al., 2016, section 4.2).")

# Gist gives the numbers of layers only, and 509 is not 6n + 2, as two convolutions a block would make it. It is
# 3 * 169 + 2: bottlenecks of three convolutions.
resnet509 = _resnet("resnet509", Bottleneck, (56, 57, 56), "ResNet with 509 layers for CIFAR-10 (Gist, section V-G).")
resnet851 = _resnet("resnet851", Bottleneck, (94, 95, 94), "ResNet with 851 layers for CIFAR-10 (Gist, section V-G).")
resnet1202 = _resnet(
    "resnet1202", BasicBlock, (200, 200, 200), "ResNet-1202 for CIFAR-10 (He et al., 2016, section 4.2: 10 classes)."
)
