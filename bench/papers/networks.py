"""The papers' networks as captured steps, on the meta device: nothing is allocated, whatever the batch."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from bench.papers.common import say
from gistkit import zoo
from gistkit.capture.entry import capture
from gistkit.ir.saved_graph import SavedGraph

TITLES = {
    "alexnet": "AlexNet", "overfeat": "OverFeat", "googlenet": "GoogLeNet", "nin": "NiN", "fcn": "FCN",
    "squeezenet": "SqueezeNet", "resnet34": "ResNet-34", "resnet50": "ResNet-50", "resnet509": "ResNet-509",
    "resnet851": "ResNet-851", "resnet1202": "ResNet-1202",
    "vgg16": "VGG-16", "vgg19": "VGG-19", "vgg101": "VGG-101", "vgg116": "VGG-116", "vgg216": "VGG-216",
    "vgg316": "VGG-316", "vgg416": "VGG-416",
}  # fmt: skip
SIZES = {"overfeat": 231, "resnet509": 32, "resnet851": 32, "resnet1202": 32}
"""Input sizes in pixels; 224 elsewhere."""


def alexnet_2012(order: str) -> nn.Module:
    """AlexNet with the local response norms of Krizhevsky et al. (2012), which the zoo's, of 2014, has not.

    ``order`` "norm, pool" as there, "pool, norm" as in Caffe's CaffeNet. One tower of 64, 192, 384, 256 and 256 maps.
    """

    def block() -> list[nn.Module]:
        norm, pool = nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2)
        return [nn.ReLU(), norm, pool] if order == "norm, pool" else [nn.ReLU(), pool, norm]

    return nn.Sequential(
        *(nn.Conv2d(3, 64, 11, stride=4, padding=2), *block(), nn.Conv2d(64, 192, 5, padding=2), *block()),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Flatten()),
        *(nn.Dropout(), nn.Linear(256 * 36, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU()),
        nn.Linear(4096, 1000),
    )


def overfeat_accurate() -> nn.Module:
    """OverFeat's accurate model (Sermanet et al., 2013, Table 3) for 221 pixels; the zoo's is the fast one."""
    layers: list[nn.Module] = []
    channels = 3
    for width, kernel, stride, pool in (
        *((96, 7, 2, 3), (256, 7, 1, 2)),
        *((512, 3, 1, 0), (512, 3, 1, 0), (1024, 3, 1, 0), (1024, 3, 1, 3)),
    ):
        layers += [nn.Conv2d(channels, width, kernel, stride=stride, padding=int(kernel == 3)), nn.ReLU()]
        layers += [nn.MaxPool2d(pool, pool)] if pool else []
        channels = width
    return nn.Sequential(
        *layers,
        *(nn.Flatten(), nn.Dropout(), nn.Linear(1024 * 25, 4096), nn.ReLU()),
        *(nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)),
    )


def vgg101_early() -> nn.Module:
    """VGG-19 with 82 more convolutions in its first three groups: 29, 29, 32, 4, 4."""
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in zip((64, 128, 256, 512, 512), (29, 29, 32, 4, 4), strict=True):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2, 2))
    classifier = [nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    classifier += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, *classifier)


class Captures:
    """Steps by network, batch and input size, each captured once."""

    def __init__(self) -> None:
        self._known: dict[tuple, SavedGraph] = {}

    def zoo(self, name: str, batch: int, *, size: int = 0, inplace: bool = True) -> SavedGraph:
        """A network of the zoo; ``inplace`` False: its ReLUs write an output of their own."""
        pixels = size or SIZES.get(name, 224)
        return self.of(lambda: getattr(zoo, name)(image_size=pixels), name, batch, size=pixels, inplace=inplace)

    def of(
        self, make: Callable[[], nn.Module], name: str, batch: int, *, size: int = 224, inplace: bool = True
    ) -> SavedGraph:
        """The step of what ``make`` makes, remembered by name, batch and size."""
        key = (name, batch, size, inplace)
        if key not in self._known:
            begun = time.perf_counter()
            with torch.device("meta"):
                model = make()
            if not inplace:
                for module in model.modules():
                    if isinstance(module, nn.ReLU):
                        module.inplace = False
            self._known[key] = capture(model, (torch.empty(batch, 3, size, size, device="meta"),), backward=True)
            say(f"captured {name} ({batch}) in {time.perf_counter() - begun:.1f} s")
        return self._known[key]
