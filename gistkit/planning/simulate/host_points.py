"""When a storage may be on the host: the points of a decision, checked against the uses of its block."""

from __future__ import annotations

from gistkit.errors import PlanError
from gistkit.ir import Block, Decision
from gistkit.planning.cost import Hardware


def wrong(block: Block, decision: Decision, what: str, remedy: str) -> PlanError:
    """The error of a decision that makes no sense, with the name of its storage."""
    name = f" ({block.name})" if block.name else ""
    return PlanError(f"storage {block.storage}{name}: {decision.codec!r} on {decision.place}: {what}; {remedy}")


def check_points(block: Block, decision: Decision, needs: list[int], gone: int, hardware: Hardware) -> None:
    """Raise PlanError unless a decision for the host leaves and comes back in time: ``gone`` is the last forward task
    for which the tensor has to be there, ``needs`` are the backward tasks, in order, for which it is wanted."""
    if not hardware.has_link:
        raise wrong(block, decision, f"{hardware.name} has no link", "keep it on the device")
    if not needs:
        raise wrong(block, decision, "no backward task needs it", "drop it or keep a mask")
    if decision.release <= gone:
        what = f"release must be after task {gone}, its last use in forward, got {decision.release}"
        raise wrong(block, decision, what, f"release it at task {gone + 1} or later")
    if decision.offload > decision.release:
        what = f"offload must be at most release {decision.release}, got {decision.offload}"
        raise wrong(block, decision, what, "leave it -1 for as soon as it is there")
    first_use = f"task {needs[0]}, its first use in backward"
    if not decision.release <= decision.prefetch <= needs[0]:
        what = f"prefetch must lie between release {decision.release} and {first_use}, got {decision.prefetch}"
        raise wrong(block, decision, what, "move it there")
    if decision.ready >= 0 and not decision.prefetch <= decision.ready <= needs[0]:
        what = f"ready must lie between prefetch {decision.prefetch} and {first_use}, got {decision.ready}"
        raise wrong(block, decision, what, "leave it -1 for the first use")
