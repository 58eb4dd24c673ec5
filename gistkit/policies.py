"""Policies: functions from a saved graph to a plan."""

from gistkit.plan.policies.gist import gist

__all__ = ["gist"]
