"""Residual networks: ResNet-18, -34, -50, -101, -152, and the CIFAR forms with 509, 851 and 1202 layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from gistkit.zoo.common import is_small, kaiming, relu


def _shortcut(width_in: int, width_out: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(width_in, width_out, 1, stride=stride, bias=False), nn.BatchNorm2d(width_out))


class _ZeroPadded(nn.Module):
    """He et al.'s option A: every ``stride``-th pixel, the new channels zero."""

    def __init__(self, width_in: int, width_out: int, stride: int) -> None:
        super().__init__()
        self.stride, self.new_channels = stride, width_out - width_in

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


Shortcut = Callable[[int, int, int], nn.Module]


class _BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, width_in: int, width: int, stride: int, shortcut: Shortcut = _shortcut) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = relu()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None if stride == 1 and width_in == width else shortcut(width_in, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class _Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, width_in: int, width: int, stride: int, shortcut: Shortcut = _shortcut) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * 4, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * 4)
        self.relu = relu()
        self.downsample = None if stride == 1 and width_in == width * 4 else shortcut(width_in, width * 4, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


Block = type[_BasicBlock] | type[_Bottleneck]


def _stage(
    block: Block, width_in: int, width: int, depth: int, stride: int, shortcut: Shortcut = _shortcut
) -> nn.Sequential:
    first = block(width_in, width, stride, shortcut)
    return nn.Sequential(first, *(block(width * block.expansion, width, 1, shortcut) for _ in range(depth - 1)))


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


class CifarResNet(nn.Module):
    """He et al. (2016), section 4.2: three stages of so many blocks, option A."""

    def __init__(self, block: Block, depths: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        wide = block.expansion
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = relu()
        self.layer1 = _stage(block, 16, 16, depths[0], 1, _ZeroPadded)
        self.layer2 = _stage(block, 16 * wide, 32, depths[1], 2, _ZeroPadded)
        self.layer3 = _stage(block, 32 * wide, 64, depths[2], 2, _ZeroPadded)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64 * wide, num_classes)
        kaiming(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def _network(name: str, block: Block, depths: tuple[int, ...], text: str) -> Callable[..., nn.Module]:
    """The function that builds a ResNet; of three stages, one for CIFAR."""

    cifar = len(depths) == 3

    def make(num_classes: int = 1000, image_size: int = 32 if cifar else 224) -> nn.Module:
        small = is_small(image_size)
        return CifarResNet(block, depths, num_classes) if cifar else _ResNet(block, depths, num_classes, small)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"{text} Input (N, 3, image_size, image_size)."
    return make


resnet18 = _network("resnet18", _BasicBlock, (2, 2, 2, 2), "ResNet-18 (He et al., 2016).")
resnet34 = _network("resnet34", _BasicBlock, (3, 4, 6, 3), "ResNet-34 (He et al., 2016).")
resnet50 = _network("resnet50", _Bottleneck, (3, 4, 6, 3), "ResNet-50, stride in the 3x3 convolution, as torchvision.")
resnet101 = _network("resnet101", _Bottleneck, (3, 4, 23, 3), "ResNet-101 (He et al., 2016), strides as in resnet50.")
resnet152 = _network("resnet152", _Bottleneck, (3, 8, 36, 3), "ResNet-152 (He et al., 2016), strides as in resnet50.")

# Gist gives the numbers of layers only, and 509 is not 6n + 2, as two convolutions a block would make it. It is
# 3 * 169 + 2: bottlenecks of three convolutions.
resnet509 = _network("resnet509", _Bottleneck, (56, 57, 56), "ResNet with 509 layers for CIFAR-10 (Gist, section V-G).")
resnet851 = _network("resnet851", _Bottleneck, (94, 95, 94), "ResNet with 851 layers for CIFAR-10 (Gist, section V-G).")
resnet1202 = _network(
    "resnet1202", _BasicBlock, (200, 200, 200), "ResNet-1202 for CIFAR-10 (He et al., 2016, section 4.2: 10 classes)."
)
