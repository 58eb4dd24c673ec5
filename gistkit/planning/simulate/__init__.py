"""Peak memory and time of a plan: the judge of all plans."""

from gistkit.planning.simulate.block_effects import block_effects
from gistkit.planning.simulate.context import Context, by_pytorch
from gistkit.planning.simulate.intervals import Beside, Effects, Interval, Load, Transfer, delays, load_of
from gistkit.planning.simulate.segments import Segment, check_sources, decoding, segments, valued
from gistkit.planning.simulate.simulator import (
    Profile,
    Simulator,
    check_per_sub_batch_norm,
    memory_bytes,
    scaled_costs,
    simulate,
    trains_batch_norm,
)
from gistkit.planning.simulate.step_index import StepIndex, used_at
