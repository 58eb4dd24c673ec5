"""Residual networks: ResNet-18, -34, -50, -101, -152."""

from __future__ import annotations

import torch
from torch import nn

from gistkit.zoo.common import is_small, kaiming, relu


def resnet18(num_classes: int = 1000, image_size: int = 224) -> nn.Module:
    """ResNet-18 (He et al., 2016). Input (N, 3, image_size, image_size)."""
    return _ResNet(_BasicBlock, (2, 2, 2, 2), num_classes, is_small(image_size))


def resnet34(num_classes: int = 1000, image_size: int = 224) -> nn.Module:
    """ResNet-34 (He et al., 2016). Input (N, 3, image_size, image_size)."""
    return _ResNet(_BasicBlock, (3, 4, 6, 3), num_classes, is_small(image_size))


def resnet50(num_classes: int = 1000, image_size: int = 224) -> nn.Module:
    """ResNet-50 with the stride in the 3x3 convolution, as torchvision. Input (N, 3, image_size, image_size)."""
    return _ResNet(_Bottleneck, (3, 4, 6, 3), num_classes, is_small(image_size))


def resnet101(num_classes: int = 1000, image_size: int = 224) -> nn.Module:
    """ResNet-101 (He et al., 2016), strides as in resnet50. Input (N, 3, image_size, image_size)."""
    return _ResNet(_Bottleneck, (3, 4, 23, 3), num_classes, is_small(image_size))


def resnet152(num_classes: int = 1000, image_size: int = 224) -> nn.Module:
    """ResNet-152 (He et al., 2016), strides as in resnet50. Input (N, 3, image_size, image_size)."""
    return _ResNet(_Bottleneck, (3, 8, 36, 3), num_classes, is_small(image_size))


def _shortcut(width_in: int, width_out: int, stride: int) -> nn.Module | None:
    if stride == 1 and width_in == width_out:
        return None
    return nn.Sequential(nn.Conv2d(width_in, width_out, 1, stride=stride, bias=False), nn.BatchNorm2d(width_out))


class _BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = relu()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(width_in, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class _Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * 4, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * 4)
        self.relu = relu()
        self.downsample = _shortcut(width_in, width * 4, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


Block = type[_BasicBlock] | type[_Bottleneck]


def _stage(block: Block, width_in: int, width: int, depth: int, stride: int) -> nn.Sequential:
    first = block(width_in, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width, 1) for _ in range(depth - 1)))


class _ResNet(nn.Module):
    def __init__(self, block: Block, depths: tuple[int, ...], num_classes: int, small: bool) -> None:
        super().__init__()
        kernel, stride = (3, 1) if small else (7, 2)
        self.conv1 = nn.Conv2d(3, 64, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = relu()
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, padding=1)
        widths = [64] + [64 * block.expansion << stage for stage in range(4)]
        self.layer1 = _stage(block, widths[0], 64, depths[0], stride=1)
        self.layer2 = _stage(block, widths[1], 128, depths[1], stride=2)
        self.layer3 = _stage(block, widths[2], 256, depths[2], stride=2)
        self.layer4 = _stage(block, widths[3], 512, depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[4], num_classes)
        kaiming(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        # one name for all stages: a name of its own would hold the stem's output until the last stage is done
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))
