"""A convolution's algorithms in one text: moDNN picks one for every task, a plan names them by call.

``winograd`` stands for all tasks of the call, ``forward=winograd,weight=fft,input=implicit_gemm`` for one each. Tasks
are named by their part, where they have none by their phase.

An algorithm is planner data, for the devices of the papers: PyTorch lets a program tell a convolution none.
"""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT = "default"
"""What PyTorch picks by itself."""


def by_part(names: Mapping[str, str]) -> str:
    """The text for algorithms by part: one name where all are equal."""
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return ",".join(f"{part}={name}" for part, name in names.items())


def of_part(algorithm: str, part: str) -> str:
    """The algorithm of one part; '' (the default) where the text names other parts only."""
    if "=" not in algorithm:
        return algorithm
    return dict(item.split("=", 1) for item in algorithm.split(",")).get(part, "")
