"""A captured step as the papers' frameworks run it, with its costs on a preset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from bench.papers.algorithms import paper_algorithms
from bench.papers.library_view import library_view
from gistkit.ir.saved_graph import SavedGraph
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import CostTable, cost_table

Step = TypeVar("Step", bound="LibraryStep")


@dataclass(frozen=True)
class LibraryStep:
    """A step in the library's view and its costs."""

    graph: SavedGraph
    costs: CostTable

    @classmethod
    def of(cls: type[Step], graph: SavedGraph, card: str) -> Step:
        """That of a captured step on a preset."""
        view = library_view(graph)
        return cls(view, cost_table(view, hardware(card), ways=paper_algorithms))
