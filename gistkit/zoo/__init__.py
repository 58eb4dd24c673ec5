"""The papers' networks, in plain ``torch.nn``: ``zoo.vgg16(num_classes=1000)``.

Structure, parameter names, initialisation and the in-place ReLUs follow torchvision's models, so its weights load into
VGG, AlexNet, SqueezeNet and the ResNets. NiN, which torchvision does not have, follows Caffe's ``nin_imagenet``;
GoogLeNet, OverFeat and FCN follow their papers. Small VGGs start from filters of zero mean, with which they learn
without batch norm. The structures of vgg101, resnet509 and resnet851 are our reading of moDNN and Gist.

Every network takes ``image_size``. From 32 to 64 it is built in its small-image form, where it has one:

| network | small-image form |
|---|---|
| vgg16, vgg19, vgg101, vgg116, vgg216, vgg316, vgg416 | pooled to 1x1 before a classifier of 512 units |
| alexnet | padded stem, 2x2 pools, pooled to 1x1, one linear layer |
| nin | the CIFAR-10 network of the NiN paper |
| resnet18, resnet34, resnet50, resnet101, resnet152 | 3x3 stem of stride 1, no max-pool |
| squeezenet | 3x3 stem of stride 1 |
| googlenet | 3x3 stem of stride 1, no max-pool behind it |
| resnet1202, resnet509, resnet851 | the CIFAR-10 networks, at every size; the latter two of bottlenecks |
| overfeat, fcn | none: images of 71 and up; a label for every pixel |
"""

from __future__ import annotations

from gistkit.zoo.chains import alexnet, fcn, nin, overfeat, vgg16, vgg19, vgg101, vgg116, vgg216, vgg316, vgg416
from gistkit.zoo.concat import googlenet, squeezenet
from gistkit.zoo.loading import MODELS, load
from gistkit.zoo.resnet import resnet18, resnet34, resnet50, resnet101, resnet152, resnet509, resnet851, resnet1202

__all__ = [  # noqa: RUF022 (by family)
    "MODELS", "load", "vgg16", "vgg19", "vgg101", "vgg116", "vgg216", "vgg316", "vgg416", "alexnet", "nin", "overfeat",
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnet509", "resnet851", "resnet1202", "squeezenet",
    "googlenet", "fcn",
]  # fmt: skip
