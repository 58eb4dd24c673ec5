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
| resnet20, resnet1202, resnet509, resnet851 | the CIFAR-10 networks, at every size; the last two of bottlenecks |
| overfeat, fcn | none: images of 71 and up; a label for every pixel |
"""

from __future__ import annotations

import difflib
import inspect
import pkgutil

from torch import nn

from gistkit.zoo.chains import alexnet, fcn, nin, overfeat, vgg16, vgg19, vgg101, vgg116, vgg216, vgg316, vgg416
from gistkit.zoo.common import Make, require
from gistkit.zoo.concat import googlenet, squeezenet
from gistkit.zoo.resnet import (
    resnet18,
    resnet20,
    resnet34,
    resnet50,
    resnet101,
    resnet152,
    resnet509,
    resnet851,
    resnet1202,
)

_NETWORKS: tuple[Make, ...] = (
    vgg16, vgg19, alexnet, nin, resnet18, resnet34, resnet50, resnet101, resnet152, squeezenet, googlenet, overfeat,
    resnet20, resnet509, resnet851, resnet1202, fcn, vgg101, vgg116, vgg216, vgg316, vgg416,
)  # fmt: skip
MODELS = {make.__name__: make for make in _NETWORKS}


def load(name: str, num_classes: int = 1000, image_size: int = 224) -> nn.Module:
    """A new network: a name of MODELS (``vgg16``), or ``package.module:factory`` (``torchvision.models:resnet50``).

    A factory gets ``num_classes`` and ``image_size`` as far as its signature takes them. Raises ValueError for an
    unknown name, for numbers below 1 or that the network does not take, for a factory that cannot be imported or
    fails; TypeError where the factory's result is no ``torch.nn.Module``.
    """
    require("num_classes", num_classes)
    require("image_size", image_size)
    if ":" not in name and name not in MODELS:
        near = difflib.get_close_matches(name.lower(), MODELS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; your own network is given as package.module:factory"
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}{hint}")
    if ":" not in name:
        return MODELS[name](num_classes=num_classes, image_size=image_size)
    try:
        factory = pkgutil.resolve_name(name)
        model = factory(**_accepted(factory, num_classes=num_classes, image_size=image_size))
    except (Exception, SystemExit) as error:  # a module may raise anything
        raise ValueError(
            f"model {name!r} cannot be made ({type(error).__name__}: {error}); give package.module:factory, a module "
            "on PYTHONPATH and a function in it that works with num_classes and image_size alone"
        ) from error
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model {name!r}: the factory must return a torch.nn.Module, got {type(model).__name__}; name a function, "
            "or a class, that makes the network"
        )
    return model


def _accepted(factory: Make, **arguments: int) -> dict[str, int]:
    """The arguments that the factory names; num_classes also through ``**kwargs``, which torchvision passes on."""
    parameters = inspect.signature(factory).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return {k: v for k, v in arguments.items() if k in parameters or (open_ended and k == "num_classes")}
