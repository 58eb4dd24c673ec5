"""Operators that keep a variance as Inductor has it in memory: as the sum of squared deviations, not yet divided.

Inductor stores that sum and divides it in every kernel that reads the variance, where the quotient and the addition of
``eps`` behind it become one operation. The kernel that computes the sum has other readers of the quotient, so there
they are two operations. (H200's machine code, triton 3.6; the reciprocal square roots differ in their last bit now and
then.) A kernel of backward that is to have the bits of one that reads the sum must read it too.

``gistkit::moment(variance, count)`` is that sum, ``gistkit::variance(moment, count)`` the variance. Outside of Inductor
both are copies of the variance.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import fx

from gistkit.compiled import compat

_LIBRARY = torch.library.Library("gistkit", "FRAGMENT")
for _name in ("moment", "variance"):
    _LIBRARY.define(f"{_name}(Tensor x, float count) -> Tensor")
    _LIBRARY.impl(_name, lambda x, count: x.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake(f"gistkit::{_name}", lambda x, count: x.clone(), lib=_LIBRARY)


@cache
def taking() -> Any:
    """The operator ``moment``; Inductor knows how to compile it from the first call on."""
    overload = torch.ops.gistkit.moment.default
    compat.register_moment_lowering(overload)
    return overload


@cache
def dividing() -> Any:
    """The operator ``variance``; Inductor knows how to compile it from the first call on."""
    overload = torch.ops.gistkit.variance.default
    compat.register_variance_lowering(overload)
    return overload


def moment_of(node: fx.Node) -> fx.Node | None:
    """What stands for a node's moment in forward's graph already."""
    return next((user for user in node.users if user.target is torch.ops.gistkit.moment.default), None)
