"""What may be done with each storage of a step: the decisions among which `optimal` chooses. They are the judge's:
exact ones, the narrow form that the caller names, zvc and csr where zeros are expected. Over the link (raw, packed or
coded bytes) a storage may leave at once or as late as the link needs, and come back at its use or so early that the
compute in between hides the transfer, with some room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from gistkit.formats import AUTO, LOSSY_FORMS, Lossy, narrow_of
from gistkit.ir import BACKWARD, FORMS, Block, Decision, SavedGraph, SavedStorage
from gistkit.planning.cost import CostTable
from gistkit.planning.forms.allowed import SMALL_BYTES, Judge
from gistkit.planning.forms.predicted import held

SPARSE = ("zvc", "csr")
FIDELITIES = ("bitwise", "reassociated", "lossy")
ROOM = (1.0, 4.0)
"""A transfer is given this many times its own seconds of compute, where it is given any."""
MANY = 300
"""With more kept storages than that a transfer has half as many points to begin and end."""


def encodings(sparse: tuple[str, ...], narrow: str | None) -> tuple[str, ...]:
    """Decoded forms, exact ones first: sparse ones, and what ``narrow`` makes of all; there are no sparse integers."""
    both = [f"{name}+{narrow}" for name in sparse]
    return sparse if narrow is None else (*sparse, *(name for name in both if name in FORMS), narrow)


def check_lossy(lossy: Lossy) -> None:
    """Raises ValueError where ``lossy`` is neither None nor a known format, nor known formats by storage."""
    if isinstance(lossy, Mapping):
        for name in lossy.values():
            check_lossy(name)
    elif lossy == AUTO:
        raise ValueError(
            'lossy="auto" measures steps of a real model, which gistkit.compress(model, lossy="auto") and '
            'gistkit.plan(model, *batch, lossy="auto") do; name a format here, such as "fp8s"'
        )
    elif lossy is not None and lossy not in LOSSY_FORMS:
        shown = f'"{lossy}"' if isinstance(lossy, str) else lossy
        raise ValueError(
            f"lossy must be None or one of {', '.join(LOSSY_FORMS)}; got lossy={shown}: the number is the bits of a "
            "value, s means a scale for every 128 elements, of integers 256"
        )


def check_fidelity(fidelity: str, lossy: Lossy = None) -> None:
    """Raises ValueError for an unknown class, an unknown lossy format, or a format outside the class ``lossy``."""
    if fidelity not in FIDELITIES:
        raise ValueError(
            f"fidelity must be one of {', '.join(FIDELITIES)}, got {fidelity!r}; bitwise changes no bit of the result"
        )
    check_lossy(lossy)
    if lossy is not None and fidelity != "lossy":
        raise ValueError(
            f'lossy={lossy!r} rounds activations, which fidelity="{fidelity}" forbids; pass fidelity="lossy"'
        )


def options(graph: SavedGraph, costs: CostTable, lossy: Lossy = None) -> dict[int, tuple[Decision, ...]]:
    """Per kept storage the decisions that its readers, the narrow formats and the hardware allow; ``dense`` is among
    them. The first is what is taken where memory does not matter."""
    listing = _Listing(graph, costs, lossy)
    return {b.storage: listing.of(b) for b in held(graph) if b.storage >= 0}


class _Listing:
    def __init__(self, graph: SavedGraph, costs: CostTable, lossy: Lossy) -> None:
        self._judge = Judge(graph)
        self._graph, self._costs, self._lossy = graph, costs, lossy
        seconds = [costs.task_s(t.index) for t in graph.tasks]
        self._start_s = np.concatenate(([0.0], np.cumsum(seconds)))
        self._many = sum(b.saved >= 0 for b in graph.blocks) > MANY
        self._backward = next((t.index for t in graph.tasks if t.phase == BACKWARD), len(graph.tasks))

    def of(self, block: Block) -> tuple[Decision, ...]:
        s = self._graph.storages[block.storage]
        why = self._why_kept(block, s)
        if why:
            return (Decision(s.id, "dense", reason=why),)
        at_home = self._at_home(block, s)
        return at_home + tuple(o for d in at_home for o in self._shipped(block, s, d))

    def _why_kept(self, block: Block, s: SavedStorage) -> str:
        if block.last >= len(self._graph.tasks) and block.read < 0:  # else a form of it outlives the step
            return "held by the caller" if s.kind == "input" else "outlives the step"
        if s.id in self._judge.late:
            return "written only after it is saved"
        own = s.id in self._judge.own and self._judge.own_map(s.id) is None  # statistics, indices without a map
        return "its op keeps it for itself" if own else ""

    def _at_home(self, block: Block, s: SavedStorage) -> tuple[Decision, ...]:
        own = self._judge.own_map(s.id)
        if own is not None:
            return (own,)
        dense = Decision(s.id, "dense", reason="kept: the budget allows it")
        least = self._judge.without_values(s.id)
        if least is None:
            return (dense, *self._with_values(s))
        if least.form.payload:
            return (least, dense)
        return (dense,) if any(u.values for u in block.uses) else (least,)

    def _with_values(self, s: SavedStorage) -> Iterable[Decision]:
        if self._judge.why_dense(s.id):
            return ()
        zvc, csr = SPARSE
        slower = self._payload_bytes(s, csr) >= self._payload_bytes(s, zvc)
        sparse = () if s.id not in self._costs.densities else (zvc,) if slower else SPARSE
        coded = self._judge.allowed(s.id, encodings(sparse, narrow_of(self._lossy, s.id)))
        coded = (d for d in coded if self._payload_bytes(s, d.codec) < s.nbytes)
        return (replace(d, reason="") for d in (*coded, *self._judge.allowed(s.id, ("rebuild",))))

    def _payload_bytes(self, s: SavedStorage, form: str) -> int:
        return self._costs.payload_bytes(form, s.nbytes, s.dtype, self._costs.densities.get(s.id))

    def _shipped(self, block: Block, s: SavedStorage, at_home: Decision) -> Iterable[Decision]:
        if not self._costs.hardware.has_link or not at_home.form.payload or not block.uses:
            return
        nbytes = self._payload_bytes(s, at_home.codec)
        if nbytes < SMALL_BYTES:
            return
        seen = set()
        for release, prefetch in self._points(block, nbytes):
            if release <= prefetch and (release, prefetch) not in seen:
                seen.add((release, prefetch))
                yield replace(at_home, place="host", release=release, prefetch=prefetch)

    def _points(self, block: Block, nbytes: int) -> Iterable[tuple[int, int]]:
        """(release, prefetch) pairs: both hurried, leaving at once but coming back early, both with room."""
        gone, need = max(block.last, block.saved) + 1, block.uses[0].task
        out_s, back_s = self._costs.d2h_s(nbytes), self._costs.h2d_s(nbytes)
        rooms = ROOM[:1] if self._many else ROOM
        points = [(self._after(gone, out_s * room), self._before(need, back_s * room)) for room in rooms]
        return [*([] if self._many else [(gone, need)]), (gone, points[0][1]), *points]

    def _after(self, task: int, seconds: float) -> int:
        """The first task from ``task`` on that begins ``seconds`` after the task before it began."""
        begun = self._start_s[task - 1] if task > 0 else 0.0
        return min(max(task, int(np.searchsorted(self._start_s, begun + seconds))), len(self._start_s) - 1)

    def _before(self, task: int, seconds: float) -> int:
        """The last task up to ``task`` that begins ``seconds`` before it, never in the forward."""
        begins = self._start_s[task] - seconds
        found = int(np.searchsorted(self._start_s, begins, side="right")) - 1
        return max(min(task, found), min(self._backward, task), 0)
