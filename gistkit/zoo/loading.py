"""A network by name: of the zoo, or of any importable module."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable

from torch import nn

from gistkit.zoo.chains import alexnet, nin, overfeat, vgg16, vgg19, vgg101, vgg116, vgg216, vgg316, vgg416
from gistkit.zoo.common import require, require_classes
from gistkit.zoo.concat import googlenet, squeezenet
from gistkit.zoo.fcn import fcn
from gistkit.zoo.resnet import resnet18, resnet34, resnet50, resnet101, resnet152, resnet509, resnet851, resnet1202

NETWORKS: tuple[Callable[..., nn.Module], ...] = (
    vgg16, vgg19, alexnet, nin, resnet18, resnet34, resnet50, resnet101, resnet152, squeezenet, googlenet, overfeat,
    resnet509, resnet851, resnet1202, fcn, vgg101, vgg116, vgg216, vgg316, vgg416,
)  # fmt: skip
MODELS = {make.__name__: make for make in NETWORKS}


def load(name: str, num_classes: int = 1000, image_size: int = 224) -> nn.Module:
    """A new network: a name of MODELS (``vgg16``), or ``package.module:factory`` (``torchvision.models:resnet50``).

    A factory gets ``num_classes`` and ``image_size`` as far as its signature takes them. Raises ValueError for an
    unknown name, for numbers below 1 or that the network does not take, for a module that cannot be imported, an
    attribute that is not there, a factory that fails; TypeError where the factory's result is no ``torch.nn.Module``.
    """
    require_classes(num_classes)
    require(image_size, 1)
    if ":" in name:
        return _load_factory(name, num_classes, image_size)
    if name not in MODELS:
        near = difflib.get_close_matches(name.lower(), MODELS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; your own network is given as package.module:factory"
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}{hint}")
    return MODELS[name](num_classes=num_classes, image_size=image_size)


def _load_factory(name: str, num_classes: int, image_size: int) -> nn.Module:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module may raise anything
        raise ValueError(
            f"model {name!r}: module {module_name!r} cannot be imported ({type(error).__name__}: {error}); "
            "install it, put it on PYTHONPATH, or mend it"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        what = "has no attribute" if factory is None else "is no function at"
        raise ValueError(f"model {name!r}: module {module_name!r} {what} {attribute!r}; give package.module:factory")
    try:
        model = factory(**_accepted(factory, num_classes=num_classes, image_size=image_size))
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"model {name!r}: the factory failed ({type(error).__name__}: {error}); it must work with num_classes and "
            "image_size alone"
        ) from error
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model {name!r}: the factory must return a torch.nn.Module, got {type(model).__name__}; name a function, "
            "or a class, that makes the network"
        )
    return model


def _accepted(factory: Callable, **arguments: int) -> dict[str, int]:
    """The arguments that the factory names; num_classes also through ``**kwargs``, which torchvision passes on."""
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:
        return {}
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return {k: v for k, v in arguments.items() if k in parameters or (open_ended and k == "num_classes")}
