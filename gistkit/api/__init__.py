"""Bodies of the public functions."""

from gistkit.api.capturing import may_be_cut
from gistkit.api.gradient_errors import Fidelity, StashError, fidelity
from gistkit.api.measuring import MeasuredStep, captured, costs_of, fitted, measure, read_steps, read_times, with_times
from gistkit.api.planning import host_remedy, plan, plan_graph
from gistkit.api.profiling import Profile, profile, profile_graph
