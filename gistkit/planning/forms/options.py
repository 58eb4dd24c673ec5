"""What may be done with each storage of a step: the decisions among which `optimal` chooses.

| class | decisions |
|---|---|
| ``bitwise`` | keep; mask, map, bits, nothing at all where backward asks for no more; zvc and csr where zeros are |
| | expected; rebuilt from what a batch norm or an addition read; raw, packed or coded bytes over the link |
| ``reassociated`` | the same, and weight gradients in batch slices (:func:`slice_counts`), and sub-batches |
| ``lossy`` | the same, and the narrow form that the caller names where every reader tolerates it |

The rules are those of the Gist policy (:mod:`gistkit.planning.forms.rules`); here they give all that is allowed instead
of the smallest. Over the link a storage may leave at once or as late as the link needs, and come back at its use or
early enough that the compute in between hides the transfer, with some room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from gistkit.codecs import VALUE_FORMS
from gistkit.ir import BACKWARD, KERNEL_DTYPES, Block, Decision, SavedGraph, SavedStorage, written_late
from gistkit.planning.cost import CostTable
from gistkit.planning.forms.lossy import may_narrow
from gistkit.planning.forms.predicted import kept_by_ops
from gistkit.planning.forms.rebuild import WITHOUT_VALUES, recipe_of
from gistkit.planning.forms.rules import SMALL_BYTES, Planner

MAPS = ("argmax4", "argmax8")
FIDELITIES = ("bitwise", "reassociated", "lossy")
ROOM = (1.0, 4.0)
"""A transfer is given this many times its own seconds of compute, where it is given any."""
MANY = 300
"""With more kept storages than that a transfer has half as many points to begin and end."""
UNCUT = 1000
"""With more kept storages than that no weight gradient is offered in batch slices: what one decodes is nothing to the
whole. ResNet-1202 (32), of 4,806, has a least peak 0.4 % lower with them, and takes 14 s longer to plan."""
SLICES = (4, 16)
"""Batch slices of a weight gradient: two of them are alive at a time, so a half and an eighth of the input."""


def check_fidelity(fidelity: str, lossy: str | None) -> None:
    """Raises ValueError for an unknown class, an unknown lossy format, or a format outside the class ``lossy``."""
    if fidelity not in FIDELITIES:
        raise ValueError(
            f"fidelity must be one of {', '.join(FIDELITIES)}; got {fidelity!r}; bitwise changes no bit of the result"
        )
    if lossy is not None and lossy not in VALUE_FORMS:
        raise ValueError(
            f"lossy must be None or one of {', '.join(VALUE_FORMS)}; got lossy={lossy!r}; None rounds nothing"
        )
    if lossy is not None and fidelity != "lossy":
        raise ValueError(
            f'lossy={lossy!r} rounds activations, which fidelity="{fidelity}" forbids; pass fidelity="lossy"'
        )


def slice_counts(fidelity: str, storages: int = 0) -> tuple[int, ...]:
    """Into how many batch slices a weight gradient may be cut: only 1 where the order of summation is fixed, or where
    a step keeps more than UNCUT storages. Of one with MANY the most alone: every further count makes a rebuild and its
    sources nine pairs for four."""
    if fidelity == "bitwise" or storages > UNCUT:
        return (1,)
    return (1, *SLICES[-1:]) if storages > MANY else (1, *SLICES)


def options(
    graph: SavedGraph, costs: CostTable, fidelity: str = "bitwise", lossy: str | None = None
) -> dict[int, tuple[Decision, ...]]:
    """Per kept storage the decisions that its readers, the class and the hardware allow; ``dense`` is among them.

    The first is what is taken where memory does not matter. ``graph`` needs tasks and blocks. Raises ValueError for an
    unknown class or format.
    """
    check_fidelity(fidelity, lossy)
    listing = _Listing(graph, costs, lossy)
    return {b.storage: listing.of(b) for b in decidable(graph)}


def decidable(graph: SavedGraph) -> list[Block]:
    """The blocks of the storages that backward keeps: those that :func:`options` is about."""
    return [b for b in graph.blocks if b.storage >= 0 and b.saved >= 0 and b.kind in ("input", "activation")]


def shipped_until(
    graph: SavedGraph, costs: CostTable, needs: Mapping[int, Iterable[int]], lossy: str | None = None
) -> dict[int, tuple[Decision, ...]]:
    """Per storage of ``needs`` its bytes over the link, back for the earliest of the given tasks, which come before its
    own first use: segments run anew from it."""
    listing = _Listing(graph, costs, lossy, few=True)
    blocks = {b.storage: b for b in graph.blocks if b.storage in needs and b.uses}
    return {s: tuple(listing.back_for(b, min(needs[s]))) for s, b in blocks.items()}


class _Listing:
    """Lists the decisions of one graph's storages."""

    def __init__(self, graph: SavedGraph, costs: CostTable, lossy: str | None, *, few: bool = False) -> None:
        self._planner = Planner(graph, lossy, costs.densities)
        self._graph, self._costs, self._lossy = graph, costs, lossy
        self._own, self._late = kept_by_ops(graph), written_late(graph)
        seconds = [costs.task_s(t.index) for t in graph.tasks]
        self._start_s = np.concatenate(([0.0], np.cumsum(seconds)))
        self._many = few or sum(b.saved >= 0 for b in graph.blocks) > MANY
        self._backward = next((t.index for t in graph.tasks if t.phase == BACKWARD), len(graph.tasks))

    def of(self, block: Block) -> tuple[Decision, ...]:
        s = self._graph.storages[block.storage]
        dense = Decision(s.id, "dense", reason="kept: the budget allows it")
        if block.last >= len(self._graph.tasks) and block.read < 0:  # else a form of it outlives the step
            return (replace(dense, reason="held by the caller" if s.kind == "input" else "outlives the step"),)
        if s.id in self._late:
            return (replace(dense, reason="written only after it is saved"),)
        ruled = self._planner.decide(s.id)
        if ruled is not None and ruled.codec == "drop" and not any(u.values for u in block.uses):
            return (ruled,)
        if s.id in self._own:
            return self._of_its_op(block, s, ruled)
        at_home = (dense, *self._at_home(s, ruled))
        if ruled is not None and ruled.codec in WITHOUT_VALUES + MAPS:
            own = ruled.codec != "mask1" and self._made_by_its_op(s)
            at_home = (ruled,) if own else (ruled, dense)
        return at_home + tuple(o for d in at_home for o in self._shipped(block, s, d))

    def _of_its_op(self, block: Block, s: SavedStorage, ruled: Decision | None) -> tuple[Decision, ...]:
        """What a covered op makes and keeps for itself has one form: the map or mask, which may leave for the host, or
        what it is (statistics, indices without a map), which the op holds on the device and nothing runs anew."""
        if ruled is None or ruled.codec not in (*MAPS, "bits"):
            return (Decision(s.id, "dense", reason="its op keeps it for itself"),)
        return (ruled, *self._shipped(block, s, ruled))

    def back_for(self, block: Block, need: int) -> Iterable[Decision]:
        """The block itself on the host, back for a task."""
        earlier = replace(block, uses=(replace(block.uses[0], task=need),))
        return self._shipped(earlier, self._graph.storages[block.storage], Decision(block.storage, "dense"))

    def _at_home(self, s: SavedStorage, ruled: Decision | None) -> Iterable[Decision]:
        """Forms on the device other than the tensor itself, of what is read by value."""
        if ruled is None or s.kind == "input" or s.escapes:
            return ()
        return () if s.nbytes < SMALL_BYTES or s.dtype not in KERNEL_DTYPES else self._with_values(s)

    def _made_by_its_op(self, s: SavedStorage) -> bool:
        """A map or mask that a covered op keeps for itself: there is no other form of it at run time."""
        savers = self._graph.savers(s.id)
        return len(savers) == 1 and savers[0][0].covered >= 0 and s.producer == savers[0][0].index

    def _with_values(self, s: SavedStorage) -> Iterable[Decision]:
        reading = self._planner.reading
        value = reading.saved(s.id)
        if value is None:
            return ()
        relu = reading.relu_behind(value)
        readers = reading.value_readers(s.id, relu)
        density = self._costs.densities.get(s.id)
        narrow = self._lossy if self._lossy and all(may_narrow(c, r) for c, r in readers) else None
        sparse = () if density is None else self._sparse(s)
        names = [*sparse, *(f"{c}+{narrow}" for c in sparse if narrow), *((narrow,) if narrow else ())]
        found = [Decision(s.id, n, mask=relu is not None and n == narrow) for n in names]
        found = [d for d in found if self._payload(s, d.codec) < s.nbytes]
        recipe = None if relu is None else recipe_of(relu, reading, self._may_have_values)
        if recipe is not None:
            rebuilt = Decision(s.id, "rebuild", "nowhere", True, recipe.sources, recipe=recipe.steps)
            found.append(rebuilt)
        return found

    def _sparse(self, s: SavedStorage) -> tuple[str, ...]:
        """zvc; csr, which is slower, only where it is smaller."""
        return ("zvc", "csr") if self._payload(s, "csr") < self._payload(s, "zvc") else ("zvc",)

    def _may_have_values(self, storage: int) -> Decision | None:
        """Stands in for the decision of a rebuild's source, which is still open."""
        ruled = self._planner.decide(storage)
        return None if ruled is None or ruled.codec in WITHOUT_VALUES else Decision(storage, "dense")

    def _payload(self, s: SavedStorage, codec: str) -> int:
        if codec == "dense":
            return s.nbytes
        return self._costs.payload_bytes(codec, s.nbytes, s.dtype, self._costs.densities.get(s.id))

    def _shipped(self, block: Block, s: SavedStorage, at_home: Decision) -> Iterable[Decision]:
        """The decision with its payload on the host between release and prefetch."""
        if not self._costs.hardware.has_link or at_home.codec == "rebuild" or not block.uses:
            return
        nbytes = self._payload(s, at_home.codec)
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
        late: Callable[[float], int] = lambda room: self._after(gone, out_s * room)  # noqa: E731
        early: Callable[[float], int] = lambda room: self._before(need, back_s * room)  # noqa: E731
        if not self._many:
            yield gone, need
        yield gone, early(1.0)
        for room in ROOM[:1] if self._many else ROOM:
            yield late(room), early(room)

    def _after(self, task: int, seconds: float) -> int:
        """The first task from ``task`` on that begins ``seconds`` after the task before it began."""
        begun = self._start_s[task - 1] if task > 0 else 0.0
        return min(max(task, int(np.searchsorted(self._start_s, begun + seconds))), len(self._start_s) - 1)

    def _before(self, task: int, seconds: float) -> int:
        """The last task up to ``task`` that begins ``seconds`` before it, never in the forward."""
        begins = self._start_s[task] - seconds
        found = int(np.searchsorted(self._start_s, begins, side="right")) - 1
        return max(min(task, found), min(self._backward, task), 0)
