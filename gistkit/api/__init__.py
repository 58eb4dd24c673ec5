"""Bodies of the public functions."""

from gistkit.api.capturing import may_be_cut, step_on, with_least_rows
from gistkit.api.comparison import Row, compare, decisions_table, least_table, policies_table
from gistkit.api.hardware import card_at_hand
from gistkit.api.measuring import Measure, check_present, costs_of, measure, read_times, times_for, with_times
from gistkit.api.planning import EXAMPLE_FORMAT, check_words, least_bytes, plan, remedy
from gistkit.api.profiling import Profile, profile, profile_graph

__all__ = [
    "EXAMPLE_FORMAT",
    "Measure",
    "Profile",
    "Row",
    "card_at_hand",
    "check_present",
    "check_words",
    "compare",
    "costs_of",
    "decisions_table",
    "least_bytes",
    "least_table",
    "may_be_cut",
    "measure",
    "plan",
    "policies_table",
    "profile",
    "profile_graph",
    "read_times",
    "remedy",
    "step_on",
    "times_for",
    "with_least_rows",
    "with_times",
]
