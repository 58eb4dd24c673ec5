"""A convolution's algorithms in one text: moDNN picks one for every task, a plan names them by call.

``winograd`` stands for all tasks of the call, ``forward=winograd,weight=fft,input=implicit_gemm`` for one each. Tasks
are named by their part, where they have none by their phase.

On the devices of the papers an algorithm is planner data. What PyTorch lets a program tell one convolution are cuDNN's
two switches (:data:`SWITCHES`), as in ``torch.backends.cudnn.flags``: not which algorithm runs, but who picks it. Their
seconds and workspace are measured (:mod:`gistkit.planning.cost.times`), and the runtime carries them out.
"""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT = "default"
"""A convolution under the switches that are in force, measured."""
SWITCHES: dict[str, tuple[bool, bool]] = {"benchmark": (True, False), "deterministic": (False, True)}
"""By name cuDNN's (benchmark, deterministic): all algorithms tried and the fastest taken, or the heuristic's choice of
the deterministic ones. Another algorithm sums in another order: such a plan is ``reassociated``."""


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


def is_switched(algorithm: str) -> bool:
    """Whether any part is told to run under other switches."""
    return any(name in algorithm for name in SWITCHES)


def switches(algorithm: str, part: str) -> str:
    """The name of :data:`SWITCHES` that a part is told to run under, '' for none: planner data tells nothing."""
    name = of_part(algorithm, part)
    return name if name in SWITCHES else ""
