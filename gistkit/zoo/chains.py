"""Networks without branches: VGG (also as deep as vDNN makes it: Rhu et al., 2016), AlexNet, NiN, OverFeat, FCN."""

from __future__ import annotations

import itertools
import math

import torch
from torch import nn

from gistkit.zoo.common import LEAST_IMAGE, Make, is_small, kaiming, named, network, relu, require

OVERFEAT_LEAST_IMAGE = 71


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


@torch.no_grad()
def _centre(model: nn.Module) -> None:
    """Take every convolution filter's mean out, and enlarge what is left so that ReLUs keep the variance (Brock, De and
    Smith, 2021: scaled weight standardisation, here once). Without batch norm, deep layers see little but the mean of
    all images: behind VGG-16's convolutions two digits have a cosine of 0.985 by He's initialisation alone, and of 0.90
    by this one, which learns in half the steps."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            weight = module.weight
            weight.sub_(weight.mean((1, 2, 3), keepdim=True)).mul_((1 - 1 / math.pi) ** -0.5)


def _vgg(name: str, depths: tuple[int, ...], text: str) -> Make:
    def build(num_classes: int, small: bool) -> nn.Module:
        pooled, units = (1, 512) if small else (7, 4096)
        features = vgg_features(depths)
        hidden = [] if small else [nn.Linear(units, units), relu(), nn.Dropout()]
        classifier = nn.Sequential(
            nn.Linear(512 * pooled**2, units), relu(), nn.Dropout(), *hidden, nn.Linear(units, num_classes)
        )
        model = _classified(features, pooled, classifier)
        if small:
            # torchvision's 0.01 is for 4096 units; with 512 inputs it would shut off the gradient.
            kaiming(model, linear_std=512**-0.5, mode="fan_in")
            _centre(model)
        else:
            kaiming(model, linear_std=0.01)
        return model

    return network(name, text, build)


def _classified(features: nn.Module, pooled: int, classifier: nn.Module) -> nn.Module:
    return named(features=features, avgpool=nn.AdaptiveAvgPool2d(pooled), flatten=nn.Flatten(), classifier=classifier)


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


def alexnet(num_classes: int = 1000, image_size: int = 224) -> nn.Module:
    """AlexNet (Krizhevsky, 2014: one tower). Input (N, 3, image_size, image_size)."""
    small = is_small(image_size)
    window = 2 if small else 3
    features = nn.Sequential(
        *(nn.Conv2d(3, 64, 11, stride=4, padding=5 if small else 2), relu(), nn.MaxPool2d(window, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), relu(), nn.MaxPool2d(window, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), relu()),
        *(nn.Conv2d(384, 256, 3, padding=1), relu()),
        *(nn.Conv2d(256, 256, 3, padding=1), relu(), nn.MaxPool2d(window, 2)),
    )
    if small:
        return _classified(features, 1, nn.Linear(256, num_classes))
    hidden = (nn.Dropout(), nn.Linear(256 * 36, 4096), relu(), nn.Dropout(), nn.Linear(4096, 4096), relu())
    return _classified(features, 6, nn.Sequential(*hidden, nn.Linear(4096, num_classes)))


def overfeat(num_classes: int = 1000, image_size: int = 231) -> nn.Module:
    """OverFeat's fast model (Sermanet et al., 2014, Table 1). Input (N, 3, image_size, image_size), 231 in the paper.

    It has no small-image form: ValueError below 71, where its pools leave nothing. Other sizes than 231 are pooled to
    the 6x6 that the classifier reads.
    """
    require("image_size", image_size, OVERFEAT_LEAST_IMAGE, "overfeat")
    features = nn.Sequential(
        *(nn.Conv2d(3, 96, 11, stride=4), relu(), nn.MaxPool2d(2, 2)),
        *(nn.Conv2d(96, 256, 5), relu(), nn.MaxPool2d(2, 2)),
        *(nn.Conv2d(256, 512, 3, padding=1), relu()),
        *(nn.Conv2d(512, 1024, 3, padding=1), relu()),
        *(nn.Conv2d(1024, 1024, 3, padding=1), relu(), nn.MaxPool2d(2, 2)),
    )
    hidden = (nn.Dropout(), nn.Linear(1024 * 36, 3072), relu(), nn.Dropout(), nn.Linear(3072, 4096), relu())
    model = _classified(features, 6, nn.Sequential(*hidden, nn.Linear(4096, num_classes)))
    kaiming(model, linear_std=0.01)
    return model


def nin(num_classes: int = 1000, image_size: int = 224) -> nn.Module:
    """Network in Network (Lin, Chen and Yan, 2014). Input (N, 3, image_size, image_size)."""
    if is_small(image_size):
        layers = [
            *_mlpconv((3, 192, 160, 96), 5, padding=2),
            *(nn.MaxPool2d(3, 2, ceil_mode=True), nn.Dropout()),
            *_mlpconv((96, 192, 192, 192), 5, padding=2),
            *(nn.AvgPool2d(3, 2, ceil_mode=True), nn.Dropout()),
            *_mlpconv((192, 192, 192, num_classes), 3, padding=1),
        ]
    else:  # Caffe rounds pooled sizes up: 54 -> 27 -> 13 -> 6 at 224.
        layers = [
            *(*_mlpconv((3, 96, 96, 96), 11, stride=4), nn.MaxPool2d(3, 2, ceil_mode=True)),
            *(*_mlpconv((96, 256, 256, 256), 5, padding=2), nn.MaxPool2d(3, 2, ceil_mode=True)),
            *(*_mlpconv((256, 384, 384, 384), 3, padding=1), nn.MaxPool2d(3, 2, ceil_mode=True), nn.Dropout()),
            *_mlpconv((384, 1024, 1024, num_classes), 3, padding=1),
        ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    kaiming(model)
    return model


def _mlpconv(widths: tuple[int, ...], kernel: int, stride: int = 1, padding: int = 0) -> list[nn.Module]:
    """NiN's micro network: one spatial convolution and 1x1 convolutions, a ReLU after each."""
    layers: list[nn.Module] = [nn.Conv2d(widths[0], widths[1], kernel, stride, padding), relu()]
    for width_in, width_out in itertools.pairwise(widths[1:]):
        layers += [nn.Conv2d(width_in, width_out, 1), relu()]
    return layers


def fcn(num_classes: int = 21, image_size: int = 500) -> nn.Module:
    """FCN-32s on VGG-16 (Long, Shelhamer and Darrell, 2015). Input (N, 3, H, W), output (N, num_classes, H, W).

    The paper trains on PASCAL VOC: 21 classes, images of about 500 pixels. As there, the first convolution pads by 100,
    so that every image of ``image_size`` 32 and up gives a score to upsample, and the result is cropped by 19 at the
    top and left. ValueError below 32.
    """
    require("image_size", image_size, LEAST_IMAGE, "fcn")
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
        # a transposed convolution that interpolates every channel by itself
        ramp = 1 - (torch.arange(64) - 31.5).abs() / 32
        with torch.no_grad():
            self.upscore.weight.zero_()[range(num_classes), range(num_classes)] = ramp[:, None] * ramp[None, :]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[-2:]
        x = self.features(x)
        x = self.drop(self.relu(self.fc6(x)))
        x = self.drop(self.relu(self.fc7(x)))
        x = self.upscore(self.score(x))
        return x[..., 19 : 19 + height, 19 : 19 + width].contiguous()
