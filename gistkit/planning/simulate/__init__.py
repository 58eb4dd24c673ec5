"""Peak memory and time of a plan: the judge of all plans."""

from gistkit.planning.simulate.block_effects import block_effects
from gistkit.planning.simulate.context import PLAIN_POLICIES, Context
from gistkit.planning.simulate.effects import Profile, check_per_sub_batch_norm, scaled_costs, trains_batch_norm
from gistkit.planning.simulate.intervals import Beside, Effects, Interval, Load, Transfer, delays, load_of
from gistkit.planning.simulate.segments import Segment, check_sources, decoding, is_decoded, segments, valued
from gistkit.planning.simulate.simulator import Simulator, memory_bytes, simulate
from gistkit.planning.simulate.step_index import StepIndex, used_at
