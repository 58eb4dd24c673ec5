"""Bodies of the public functions."""

from gistkit.api.capturing import may_be_cut, step_on, with_least_rows
from gistkit.api.comparison import Row, compare, decisions_table, least_table, policies_table
from gistkit.api.measuring import Measure, check_present, costs_of, measure, read_times, times_for, with_times
from gistkit.api.planning import plan
from gistkit.api.profiling import Profile, profile, profile_graph
