"""The papers' networks, in plain ``torch.nn``: ``zoo.vgg16(num_classes=1000)``.

Structure, parameter names, initialisation and the in-place ReLUs follow torchvision's models, so its weights load into
VGG, AlexNet, SqueezeNet and the ResNets. NiN, which torchvision does not have, follows Caffe's ``nin_imagenet``;
GoogLeNet, OverFeat and FCN follow their papers. Small VGGs start from filters of zero mean (``common.centre``), with
which they learn without batch norm.

Every network takes ``image_size``. Up to 64 it is built in its small-image form, where it has one:

| network | parameters | small-image form (32 and up), with 10 classes | parameters |
|---|---|---|---|
| vgg16 | 138,357,544 | pooled to 1x1 before a classifier of 512 units | 14,982,474 |
| vgg19 | 143,667,240 | likewise | 20,292,170 |
| alexnet | 61,100,840 | padded stem, 2x2 pools, pooled to 1x1, one linear layer | 2,472,266 |
| nin | 7,595,176 | the CIFAR-10 network of the NiN paper | 966,986 |
| resnet18 | 11,689,512 | 3x3 stem of stride 1, no max-pool | 11,173,962 |
| resnet34 | 21,797,672 | likewise | 21,282,122 |
| resnet50 | 25,557,032 | likewise | 23,520,842 |
| resnet101 | 44,549,160 | likewise | 42,512,970 |
| resnet152 | 60,192,808 | likewise | 58,156,618 |
| squeezenet | 1,248,424 | 3x3 stem of stride 1 | 729,034 |
| googlenet | 6,998,552 | 3x3 stem of stride 1, no max-pool behind it | 5,976,122 |
| overfeat | 145,920,872 | none: images of 71 and up | |
| fcn | 136,152,917 (21 classes; 500 pixels) | none: a label for every pixel | |
| resnet1202 | 19,485,624 | the CIFAR-10 network of the ResNet paper, at every size | 19,421,274 |
| resnet509 | 5,457,464 | likewise, bottlenecks (the structure is our reading of Gist) | 5,203,034 |
| resnet851 | 8,981,432 | likewise | 8,727,002 |
| vgg101 | 236,294,184 | as vgg16 (the structure is our reading of moDNN) | 112,919,114 |
| vgg116 | 248,241,704 | as vgg16 | 124,866,634 |
| vgg216 | 358,125,864 | as vgg16 | 234,750,794 |
| vgg316 | 468,010,024 | as vgg16 | 344,634,954 |
| vgg416 | 577,894,184 | as vgg16 | 454,519,114 |
"""

from __future__ import annotations

from gistkit.zoo.chains import alexnet, nin, overfeat, vgg16, vgg19, vgg101, vgg116, vgg216, vgg316, vgg416
from gistkit.zoo.concat import googlenet, squeezenet
from gistkit.zoo.fcn import fcn
from gistkit.zoo.loading import MODELS, load
from gistkit.zoo.resnet import resnet18, resnet34, resnet50, resnet101, resnet152, resnet509, resnet851, resnet1202

__all__ = [  # noqa: RUF022 (by family)
    "MODELS", "load", "vgg16", "vgg19", "vgg101", "vgg116", "vgg216", "vgg316", "vgg416", "alexnet", "nin", "overfeat",
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnet509", "resnet851", "resnet1202", "squeezenet",
    "googlenet", "fcn",
]  # fmt: skip
