"""What one storage's decision does to memory, time and link.

| form | memory | seconds |
|---|---|---|
| none, ``dense`` | dense from its making to its last use | |
| decoded ones | dense in forward; payload from the save on; decoded while a reader needs values | encode, decode |
| ``mask1`` | dense in forward; payload from the save on | its own traffic |
| pool maps, dropout masks | payload: their operators write them so | their own traffic |
| ``rebuild`` | dense in forward; decoded while a reader needs values; its norms' factors | the chain of its recipe |
| ``recompute`` | dense in forward; again from its segment's rerun on | the segment's |
| ``drop`` | dense in forward | |
| place ``host`` | payload until ``release``, again from ``prefetch`` on | encode, decode; the link's; a task's host |
| | | time for the way out and one for the way back |

Gist Fig. 2 (three lifetimes: dense, encoded, decoded); vDNN section III-B (release after the offload, prefetch).
Segments that run anew: :mod:`gistkit.planning.simulate.segments`.
"""

from __future__ import annotations

from gistkit.errors import PlanError
from gistkit.ir import (
    LIBRARY,
    OPERATORS,
    RERUN,
    STAY,
    Block,
    Decision,
    SavedGraph,
    arithmetic_bytes,
    chain,
    digest_bytes,
    held,
    norms,
)  # fmt: skip
from gistkit.planning.cost import CostTable, Hardware
from gistkit.planning.simulate.context import Context
from gistkit.planning.simulate.intervals import Effects, Interval, Transfer

_WHAT = {"activation": "dense", "gradient": "gradient", "weight_gradient": "gradient"}
_FACTOR_BYTES = 4
_ALIGNED_BYTES, _LANE_BYTES = 64, 1536
"""What an encoding that comes back from the host may take beyond its payload, as its parts are aligned: in one piece,
and with its packed items out of a lane (gistkit.runtime.offload)."""


def block_effects(
    graph: SavedGraph, costs: CostTable, decision: Decision | None, block: Block, context: Context
) -> Effects:
    """The effects of one block's decision, None for none. All blocks' effects add up to the step's. ``context`` is the
    rest of the plan (:meth:`Context.of`). Raises PlanError, which names the storage, for a decision that makes no
    sense: gone before its last forward use, back after its first, values of a form without, no link."""
    if decision is None:
        return _dense(block, context)
    if decision.form.returns == STAY and not decision.on_host and not decision.mask:
        return _dense(block, context)
    if block.saved < 0 or block.kind not in ("activation", "input"):
        raise _wrong(block, decision, f"backward keeps nothing of this {block.kind}", "leave it undecided")
    return _DecidedBlock(graph, costs, decision, block, context).effects()


def _value_tasks(block: Block, context: Context, *, signs_too: bool) -> list[int]:
    """Tasks during which the values must be there: readers in backward, and what is made of it anew."""
    tasks = {u.task for u in block.uses if u.values or signs_too}
    return sorted(tasks | context.also.get(block.id, frozenset()))


def _held_until(block: Block, tasks: list[int], context: Context) -> int:
    """The last of some tasks; where PyTorch's own operators run, a convolution's backward is one operator."""
    if context.plain:
        later = context.index.input_part
        tasks = [later.get(t, t) for t in tasks] + [block.holder]
    return max(tasks, default=-1)


def _dense(block: Block, context: Context) -> Effects:
    needed = _held_until(block, _value_tasks(block, context, signs_too=True), context)
    last = max(block.last, needed)
    return Effects((Interval(block.first, last, block.nbytes, block.id, _WHAT.get(block.kind, "static")),))


class _DecidedBlock:
    def __init__(self, graph: SavedGraph, costs: CostTable, decision: Decision, block: Block, context: Context) -> None:
        self.graph, self.costs, self.decision, self.block, self.context = graph, costs, decision, block, context
        self.form = decision.form
        self.size = block.nbytes, block.dtype, costs.densities.get(block.storage)
        signs = [u.task for u in block.uses if not u.values]
        self.signs_on_mask, self.signs_on_payload = (signs, []) if decision.mask else ([], signs)
        self.values = _value_tasks(block, context, signs_too=False)
        self.segments_own = context.decoded_for_segment.get(block.id, frozenset())
        self.needs = sorted({*self.values, *self.signs_on_payload})
        # until when nodes that lead nowhere hold what stands for the block
        self.dead = [block.last] if block.read >= 0 else []
        self.intervals: list[Interval] = []
        self.extra: list[tuple[int, float]] = []
        self.transfers: list[Transfer] = []

    def effects(self) -> Effects:
        block = self.block
        # one call makes it, keeps it and is the only one to read it: a dropout's mask, a pool's map
        made_for_backward = block.first == block.last == block.saved
        if self.form.made_by_op and (made_for_backward or not self.form.values):
            self._own_map()
        elif self.form.returns == STAY:
            self._mask()
            self._place(block.first, self.needs, block.nbytes, "dense")
        else:
            dense_last = block.read if block.read >= 0 else block.last
            self._add(block.first, dense_last, block.nbytes, "dense")
            self._mask()
            self._form()
        hardware = self.costs.hardware
        issued = [(t.issue, hardware.move_host_factor) for t in self.transfers]
        if self.form.returns not in (STAY, RERUN):  # encoded and decoded, or rebuilt
            issued.append((max(block.saved, 0), hardware.form_host_factor))
        return Effects(tuple(self.intervals), tuple(self.extra), tuple(self.transfers), tuple(issued))

    def _form(self) -> None:
        if self.values and not self.form.values:
            what = f"task {self.values[0]} needs its values, which are not kept"
            raise _wrong(self.block, self.decision, what, "keep them in a form that gives them back")
        if self.form.returns == OPERATORS:
            self._rebuilt()
        elif self.form.returns == RERUN:
            self._again()
        elif self.form.payload:
            self._coded()

    def _add(self, first: int, last: int, nbytes: int, what: str) -> None:
        if last >= first and nbytes:
            self.intervals.append(Interval(first, last, nbytes, self.block.id, what))

    def _own_map(self) -> None:
        block, codec = self.block, self.decision.codec
        payload_bytes = self.costs.payload_bytes(codec, *self.size)
        self._place(block.first, [u.task for u in block.uses], payload_bytes, "payload")
        if self.form.values:  # a dropout's noise is there beside input, output and bits
            self._add(block.first, block.first, block.nbytes, "scratch")
        self.extra.append((block.first, self.costs.encode_s(codec, *self.size)))
        self.extra += [(u.task, self.costs.decode_s(codec, *self.size)) for u in block.uses]

    def _mask(self) -> None:
        block, dead = self.block, self.dead if self.decision.mask else []
        if not (self.signs_on_mask or dead):
            return
        last = max(*self.signs_on_mask, *dead, block.saved)
        self._add(block.saved, last, self.costs.payload_bytes("mask1", *self.size), "mask")
        self.extra.append((block.saved, self.costs.encode_s("mask1", *self.size)))
        saved_s = self.costs.relu_backward_s("mask1", *self.size)
        self.extra += [(t, saved_s) for t in self.signs_on_mask]

    def _rebuilt(self) -> None:
        block, recipe = self.block, self.decision.recipe
        traffic, launches = chain(recipe) if recipe else (2 + len(self.decision.sources), 1)
        seconds = self.costs.copy_s(traffic * block.nbytes) + (launches - 1) * self.costs.copy_s(0)
        covered = self.context.index.covered
        channels = (self.graph.values[covered[n].operands[0]].shape[1] for n in norms(recipe) if n in covered)
        factors_bytes = 2 * _FACTOR_BYTES * sum(channels)  # two vectors for each norm whose output is made anew
        self._verified(self.context.index.written.get(block.id, -1))
        for task in self.needs:
            self._add(task, task, factors_bytes, "scratch")
            self._add(task, task, held(recipe) * block.nbytes, "decoded")
            self.extra.append((task, seconds))
            self._verified(task, arithmetic_bytes(block.nbytes, block.dtype) if norms(recipe) else 0)

    def _verified(self, task: int, made_bytes: int = 0) -> None:
        """Scratch for a digest, in forward or, before the backward task makes anything, of what came back, which was
        made with ``made_bytes`` of its own."""
        nbytes = max(made_bytes, digest_bytes(self.block.nbytes, self.context.index.rows(self.block.id)))
        if task > self.block.saved:
            written = (self.graph.blocks[b] for b in self.graph.tasks[task].writes)
            nbytes -= sum(b.nbytes for b in written if b.first == task)
        self._add(task, task, max(0, nbytes), "scratch")

    def _again(self) -> None:
        start = self.context.restart.get(self.block.id, min(self.needs, default=self.block.holder))
        last = _held_until(self.block, self.needs, self.context)
        self._add(start, last, self.block.nbytes, "decoded")
        if self.graph.source != LIBRARY:
            self._verified(self.block.saved)

    def _coded(self) -> None:
        block, codec = self.block, self.decision.codec
        if self.signs_on_payload and not self.form.signs:
            what = f"task {self.signs_on_payload[0]} needs its signs, of which narrow floats lose some"
            raise _wrong(block, self.decision, what, "add mask=True")
        self._place(block.saved, self.needs, self.costs.payload_bytes(codec, *self.size), "payload")
        self.extra.append((block.saved, self.costs.encode_s(codec, *self.size)))
        for task in self.values:
            if task not in self.segments_own:
                self._add(task, task, block.nbytes, "decoded")
            self.extra.append((task, self.costs.decode_s(codec, *self.size)))
        self.extra += [(t, self.costs.relu_backward_s(codec, *self.size)) for t in self.signs_on_payload]

    def _place(self, first: int, needs: list[int], nbytes: int, what: str) -> None:
        """The payload on the device from ``first`` to the last need, or with a stay on the host in between."""
        block, decision = self.block, self.decision
        if not decision.on_host:
            last = _held_until(block, needs, self.context) if needs else first
            if what == "dense" or self.dead:
                last = max(last, block.last)
            return self._pending(first, last, nbytes, what)
        gone = max(block.last, block.saved)
        _check_points(block, decision, needs, gone, self.costs.hardware)
        self._pending(first, decision.release - 1, nbytes, what)
        aligned_bytes = 0 if what == "dense" else _LANE_BYTES if self.costs.hardware.async_counts else _ALIGNED_BYTES
        self._add(decision.prefetch, _held_until(block, needs, self.context), nbytes + aligned_bytes, what)
        # the payload is whole behind its save and its block's last write; a dense form may leave while its reader runs
        whole = max(-1 if what == "dense" else block.saved, self.context.index.written.get(block.id, -1))
        issue = max(decision.offload, block.saved, whole + 1)
        due = needs[0] if decision.ready < 0 else decision.ready
        self.transfers.append(Transfer(block.storage, nbytes, "d2h", issue, decision.release))
        self.transfers.append(Transfer(block.storage, nbytes, "h2d", decision.prefetch, due))

    def _pending(self, first: int, last: int, nbytes: int, what: str) -> None:
        """A payload; of a sparse one on CUDA the worst-case scratch until its size is known (runtime.sparse_sizes)."""
        if not self.form.sparse:
            return self._add(first, last, nbytes, what)
        scratch_bytes, packing_bytes, decodes_scratch = self.costs.scratch(self.decision.codec, *self.size)
        if not self.costs.hardware.async_counts:
            self._add(first, first, packing_bytes, "scratch")
            return self._add(first, last, nbytes, what)
        settled = self.context.scratch_end(first)
        if self.decision.on_host:
            if packing_bytes:  # not packed on its way, but at once
                self._add(first, first, nbytes + packing_bytes, what)
            return self._add(first, last, scratch_bytes, "scratch")
        end = last if settled is None else min(settled, last)
        if settled is None and self.values and not decodes_scratch:
            # packed before its first use, when there is room for what is decoded then
            end, settled = self.values[0], self.values[0] + 1
            decoded_bytes = 0 if end in self.segments_own else self.block.nbytes
            packing_bytes = max(0, nbytes + packing_bytes - decoded_bytes)
        self._add(first, end, scratch_bytes, "scratch")
        if self.context.least and settled is not None:
            packing_bytes, settled = 0, end + 1
        if settled is not None:
            self._add(end, end, packing_bytes, "scratch")
            self._add(settled, last, nbytes, what)


def _wrong(block: Block, decision: Decision, what: str, remedy: str) -> PlanError:
    name = f" ({block.name})" if block.name else ""
    return PlanError(f"storage {block.storage}{name}: {decision.codec!r} on {decision.place}: {what}; {remedy}")


def _check_points(block: Block, decision: Decision, needs: list[int], gone: int, hardware: Hardware) -> None:
    """``gone``: the last forward task that needs the tensor, ``needs``: the backward tasks that do, in order."""
    if not hardware.has_link:
        raise _wrong(block, decision, f"{hardware.name} has no link", "keep it on the device")
    if not needs:
        raise _wrong(block, decision, "no backward task needs it", "drop it or keep a mask")
    release, prefetch, ready, offload = decision.release, decision.prefetch, decision.ready, decision.offload
    back = prefetch if ready < 0 else ready
    if not (offload <= release and gone < release <= prefetch <= back <= needs[0]):
        what = f"it must leave behind task {gone} and be back before task {needs[0]}, its first use in backward"
        points = f"offload {offload}, release {release}, prefetch {prefetch}, ready {ready}"
        raise _wrong(block, decision, f"{what}, got {points}", "move it there, -1 leaves offload and ready open")
