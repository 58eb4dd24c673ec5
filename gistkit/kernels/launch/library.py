"""Registration of gistkit's operators with PyTorch's dispatcher.

One schema, three implementations: ``CPU`` is the oracle in :mod:`gistkit.kernels.reference`, ``CUDA`` the Triton
launcher, fake tensors get shapes. Triton is imported at the first CUDA call and not before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache

import torch

LIBRARY = torch.library.Library("gistkit", "DEF")

LAUNCHERS = {
    "mask": "gistkit.kernels.mask.mask",
    "narrow": "gistkit.kernels.narrow.narrow",
    "sparse": "gistkit.kernels.sparse.operators",
    "compact": "gistkit.kernels.sparse.compact",
    "zvc": "gistkit.kernels.sparse.zvc_launches",
    "pool": "gistkit.kernels.pool.operators",
    "rebuild": "gistkit.kernels.rebuild.rebuild",
}
"""By family of operators the module of its CUDA launchers. They import Triton, so each is imported at its first
call."""


def _lazy(module: str, name: str) -> Callable:
    resolved = cache(lambda: getattr(importlib.import_module(module), name))
    return lambda *args, **kwargs: resolved()(*args, **kwargs)


def operator(family: str, schema: str) -> Callable[[Callable | None], Callable]:
    """Define ``gistkit::name`` from its schema; the decorated function is its fake (shapes only) implementation. None
    in its place: for CPU tensors alone, where sizes depend on values; there is no launcher then.

    The CPU oracle is ``kernels.reference.<family>.name``, the CUDA launcher ``kernels.<family>.name``. Returns the
    callable operator overload, so the module's name is bound to what callers use.
    """
    name = schema[: schema.index("(")]

    def bind(fake: Callable | None) -> Callable:
        LIBRARY.define(schema)
        LIBRARY.impl(name, _lazy(f"gistkit.kernels.reference.{family}", name), "CPU")
        if fake is not None:
            LIBRARY.impl(name, _lazy(LAUNCHERS[family], name), "CUDA")
            torch.library.register_fake(f"gistkit::{name}", fake, lib=LIBRARY)
        return getattr(torch.ops.gistkit, name).default

    return bind
