"""``gistkit.policies``: the Gist policy, a function from a saved graph to a plan."""

from gistkit.planning.policies import gist

__all__ = ["gist"]
