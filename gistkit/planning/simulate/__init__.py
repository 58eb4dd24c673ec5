"""Peak memory and time of a plan: the judge of all plans."""

from gistkit.planning.simulate.block_effects import block_effects
from gistkit.planning.simulate.context import NO_VALUES, PLAIN_POLICIES, Context, StepIndex, is_sparse, used_at
from gistkit.planning.simulate.intervals import Effects, Interval, Transfer
from gistkit.planning.simulate.segments import Segment, decoding, is_decoded, segments, valued
from gistkit.planning.simulate.simulator import Profile, Simulator, memory_bytes, simulate
from gistkit.planning.simulate.sub_batches import (
    check_per_sub_batch_norm,
    scaled_costs,
    trains_batch_norm,
)

__all__ = [
    "NO_VALUES",
    "PLAIN_POLICIES",
    "Context",
    "Effects",
    "Interval",
    "Profile",
    "Segment",
    "Simulator",
    "StepIndex",
    "Transfer",
    "block_effects",
    "check_per_sub_batch_norm",
    "decoding",
    "is_decoded",
    "is_sparse",
    "memory_bytes",
    "scaled_costs",
    "segments",
    "simulate",
    "trains_batch_norm",
    "used_at",
    "valued",
]
