"""``gistkit.functional``: the functions of :mod:`gistkit.nn.functional`."""

from gistkit.nn.functional import (
    Keep,
    Kept,
    batch_norm,
    bn_apply,
    conv2d,
    dropout,
    keep_coded,
    keep_dense,
    linear,
    max_pool2d,
    rebuild_candidates,
    relu,
    relu_max_pool2d,
)

__all__ = [
    "Keep",
    "Kept",
    "batch_norm",
    "bn_apply",
    "conv2d",
    "dropout",
    "keep_coded",
    "keep_dense",
    "linear",
    "max_pool2d",
    "rebuild_candidates",
    "relu",
    "relu_max_pool2d",
]
