"""Policies: functions (graph, costs, budget) -> Plan, by name in POLICIES."""

from gistkit.planning.forms import check_lossy
from gistkit.planning.policies.gist_rules import gist
from gistkit.planning.policies.optimal.optimal import LARGE_TASKS, minimise_peak
from gistkit.planning.policies.registry import POLICIES
