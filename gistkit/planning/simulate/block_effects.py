"""What one storage's decision does to memory, time and link: the part of the planner that knows what decisions mean.

| decision | memory | seconds |
|---|---|---|
| none, ``dense`` | dense from its making to its last use | |
| value codecs | dense in forward; payload from the save on; decoded while a reader needs values | encode, decode |
| ``mask1`` | dense in forward; payload from the save on | its own traffic |
| pool maps, dropout masks | payload: they are made in this form | its own traffic |
| ``rebuild`` | dense in forward; decoded while a reader needs values; its norms' factors | the chain of its recipe |
| ``recompute`` | dense in forward; again from its segment's rerun on | the segment's
(:mod:`gistkit.planning.simulate.segments`) |
| ``drop`` | dense in forward | |
| place ``host`` | payload until ``release``, again from ``prefetch`` on | encode, decode; the link's |

Gist Fig. 2 (three lifetimes: dense, encoded, decoded); vDNN section III-B (release after the offload, prefetch). Where
transfers overlap nothing (``Context.synchronous``) the payload is out once saved and back at its first use.
"""

from __future__ import annotations

from gistkit.codecs import VALUE_FORMS
from gistkit.formats import ceil_div
from gistkit.ir import Block, Decision, SavedGraph, arithmetic_bytes, chain, digest_bytes, held, norms
from gistkit.planning.cost import CostTable
from gistkit.planning.simulate.context import Context, is_sparse
from gistkit.planning.simulate.host_points import check_points, wrong
from gistkit.planning.simulate.intervals import Effects, Interval, Transfer

_WHAT = {"activation": "dense", "gradient": "gradient", "weight_gradient": "gradient"}
_FACTOR_BYTES = 4
_FOR_SIGNS = ("mask1", "drop")


def block_effects(
    graph: SavedGraph, costs: CostTable, decision: Decision | None, block: Block, context: Context | None = None
) -> Effects:
    """The effects of one block's decision, None for none. All blocks' effects add up to the step's.

    ``context`` is the rest of the plan (:meth:`Context.of`); without it :meth:`Context.alone` is taken. Raises
    PlanError, which names the storage, for a decision that makes no sense: release before the last forward use,
    prefetch after the first use, values wanted of a form that keeps none, no link to the host.
    """
    context = context or Context.alone(graph, costs)
    if decision is None:
        return _dense(block, context)
    if decision.place not in ("device", "host", "nowhere"):
        raise wrong(block, decision, "place must be device, host or nowhere", "take one of these")
    if decision.codec == "dense" and decision.place != "host" and not decision.mask:
        return _dense(block, context)
    if block.saved < 0 or block.kind not in ("activation", "input"):
        raise wrong(block, decision, f"backward keeps nothing of this {block.kind}", "leave it undecided")
    return _Case(graph, costs, decision, block, context).effects()


def _forward_last(block: Block, context: Context) -> int:
    return block.last - (block.id in context.ends_early and block.last > block.first)


def _read_last(block: Block, context: Context) -> int:
    """The last task during which the dense form of what is kept in another one is there."""
    return _forward_last(block, context) if block.read < 0 else block.read


def _value_tasks(block: Block, context: Context, *, signs_too: bool) -> list[int]:
    """Tasks during which the values must be there: readers in backward, and what is made of it anew."""
    tasks = {u.task for u in block.uses if u.values or signs_too}
    if context.also:
        tasks |= context.also.get(block.id, frozenset())
    return sorted(tasks)


def _held_until(block: Block, tasks: list[int], context: Context) -> int:
    """The last of some tasks; where PyTorch's own operators run, a convolution's backward is one operator."""
    if context.plain:
        later = context.index.input_part
        tasks = [later.get(t, t) for t in tasks] + [block.holder]
    return max(tasks, default=-1)


def _dense(block: Block, context: Context) -> Effects:
    needed = _held_until(block, _value_tasks(block, context, signs_too=True), context)
    last = max(_forward_last(block, context), needed)
    return Effects((Interval(block.first, last, block.nbytes, block.id, _WHAT.get(block.kind, "static")),))


class _Case:
    """One decision other than dense on the device."""

    def __init__(self, graph: SavedGraph, costs: CostTable, decision: Decision, block: Block, context: Context) -> None:
        self.graph, self.costs, self.decision, self.block, self.context = graph, costs, decision, block, context
        self.density = costs.densities.get(block.storage)
        signs = [u.task for u in block.uses if not u.values]
        self.signs_on_mask = signs if decision.mask else []
        self.signs_on_payload = [] if decision.mask else signs
        self.values = _value_tasks(block, context, signs_too=False)
        self.lent = (context.lent or {}).get(block.id, frozenset())
        self.needs = sorted({*self.values, *self.signs_on_payload})
        # until when nodes that lead nowhere hold what stands for the block
        self.dead = [block.last] if block.read >= 0 else []
        self.intervals: list[Interval] = []
        self.extra: list[tuple[int, float]] = []
        self.transfers: list[Transfer] = []

    def effects(self) -> Effects:
        decision, block = self.decision, self.block
        if decision.codec in ("argmax4", "argmax8") or (decision.codec == "bits" and _made_by_its_op(block)):
            self._own_map()
        else:
            if decision.codec != "dense":
                self._add(block.first, _read_last(block, self.context), block.nbytes, "dense")
            self._mask()
            self._form()
        return Effects(tuple(self.intervals), tuple(self.extra), tuple(self.transfers))

    def _add(self, first: int, last: int, nbytes: int, what: str) -> None:
        if last >= first and nbytes:
            self.intervals.append(Interval(first, last, nbytes, self.block.id, what))

    def _payload_bytes(self, codec: str, density: float | None) -> int:
        return self.costs.payload_bytes(codec, self.block.nbytes, self.block.dtype, density)

    def _own_map(self) -> None:
        block, codec = self.block, self.decision.codec
        measures = (codec, block.nbytes, block.dtype, None)
        self._place(block.first, [u.task for u in block.uses], self._payload_bytes(codec, None), "payload")
        if codec == "bits":  # a dropout's noise is there beside input, output and bits
            self._add(block.first, block.first, block.nbytes, "scratch")
        self.extra.append((block.first, self.costs.encode_s(*measures)))
        self.extra += [(u.task, self.costs.decode_s(*measures)) for u in block.uses]

    def _mask(self) -> None:
        block, dead = self.block, self.dead if self.decision.mask else []
        if not (self.signs_on_mask or dead):
            return
        nbytes = self._payload_bytes("mask1", None)
        self._add(block.saved, max(*self.signs_on_mask, *dead, block.saved), nbytes, "mask")
        self.extra.append((block.saved, self.costs.encode_s("mask1", block.nbytes, block.dtype, None)))
        saved_s = self.costs.relu_backward_s("mask1", block.nbytes, block.dtype, None)
        self.extra += [(t, saved_s) for t in self.signs_on_mask]

    def _form(self) -> None:
        codec = self.decision.codec
        if codec == "dense":
            self._place(self.block.first, self.needs, self.block.nbytes, "dense")
        elif codec in _FOR_SIGNS:
            self._sign_only()
        elif codec == "rebuild":
            self._rebuilt()
        elif codec == "recompute":
            self._again()
        else:
            self._coded()

    def _sign_only(self) -> None:
        if self.values:
            what = f"task {self.values[0]} needs its values, which are not kept"
            raise wrong(self.block, self.decision, what, "keep them in a form that gives them back")
        if self.decision.codec == "mask1":
            self.values = []
            self._coded()

    def _rebuilt(self) -> None:
        block, recipe = self.block, self.decision.recipe
        traffic, launches = chain(recipe) if recipe else (2 + len(self.decision.sources), 1)
        seconds = self.costs.copy_s(traffic * block.nbytes) + (launches - 1) * self.costs.copy_s(0)
        for norm in norms(recipe) if self.needs or self.dead else ():
            self._factors(norm)
        self._checked(self.context.index.written.get(block.id, -1))
        for task in self.needs:
            self._add(task, task, self._decoded_bytes(task, held(recipe)), "decoded")
            self.extra.append((task, seconds))
            self._checked(task, arithmetic_bytes(block.nbytes, block.dtype) if norms(recipe) else 0)

    def _checked(self, task: int, made_bytes: int = 0) -> None:
        """Scratch for a digest, in forward or of what came back, which was made with ``made_bytes`` of its own: before
        a backward task has made anything itself."""
        shape = self.graph.storages[self.block.storage].shape
        nbytes = max(made_bytes, digest_bytes(self.block.nbytes, shape[0] if shape else 1))
        if task > self.block.saved:
            written = (self.graph.blocks[b] for b in self.graph.tasks[task].writes)
            nbytes -= sum(b.nbytes for b in written if b.first == task)
        self._add(task, task, max(0, nbytes), "scratch")

    def _factors(self, norm: int) -> None:
        """What a batch norm's output is made of anew besides its input: two vectors, at every need."""
        call = self.context.index.covered.get(norm)
        if call is not None:
            channels = self.graph.values[call.operands[0]].shape[1]
            for task in self.needs:
                self._add(task, task, 2 * _FACTOR_BYTES * channels, "scratch")

    def _again(self) -> None:
        start = (self.context.restart or {}).get(self.block.id)
        if start is None:
            start = min(self.needs, default=self.block.holder)
        last = _held_until(self.block, self.needs, self.context)
        self._add(start, last, self.block.nbytes, "decoded")
        self._checked(self.block.saved)

    def _coded(self) -> None:
        block, codec = self.block, self.decision.codec
        if self.signs_on_payload and codec in VALUE_FORMS:
            what = f"task {self.signs_on_payload[0]} needs its signs, of which narrow floats lose some"
            raise wrong(block, self.decision, what, "add mask=True")
        measures = (codec, block.nbytes, block.dtype, self.density)
        nbytes = self._payload_bytes(codec, self.density)
        self._place(block.saved, self.needs, nbytes, "payload")
        self.extra.append((block.saved, self.costs.encode_s(*measures)))
        for task in self.values:
            if task not in self.lent:
                self._add(task, task, self._decoded_bytes(task), "decoded")
            self.extra.append((task, self.costs.decode_s(*measures)))
        self.extra += [(t, self.costs.relu_backward_s(*measures)) for t in self.signs_on_payload]

    def _decoded_bytes(self, task: int, at_once: int = 1) -> int:
        """Bytes of the dense form while a task reads it, made of so many tensors ``at_once``. Where the task is cut,
        those of a batch slice, beside the last slice that it has read; what only feeds a rebuild is let go of."""
        slices = (self.context.slices or {}).get(task, 1)
        if self.graph.batch:
            slices = min(slices, self.graph.batch)
        nbytes = self.block.nbytes
        if slices == 1:
            return at_once * nbytes
        read = any(u.task == task for u in self.block.uses)
        return min(at_once * nbytes, (at_once + read) * ceil_div(nbytes, slices))

    def _place(self, first: int, needs: list[int], nbytes: int, what: str) -> None:
        """The payload on the device from ``first`` to the last need, or with a stay on the host in between."""
        block, decision = self.block, self.decision
        if decision.place != "host":
            last = _held_until(block, needs, self.context) if needs else first
            if what == "dense" or self.dead:
                last = max(last, _forward_last(block, self.context))
            return self._pending(first, last, nbytes, what)
        gone = max(_forward_last(block, self.context), block.saved)
        check_points(block, decision, needs, gone, self.costs.hardware)
        last = _held_until(block, needs, self.context)
        out, back = decision.release - 1, decision.prefetch
        if self.context.synchronous:
            out, back = (gone if what == "dense" else first), needs[0]
        self._pending(first, out, nbytes, what)
        self._add(back, last, nbytes, what)
        earliest = self._written(what) + 1
        issue = max(decision.offload, block.saved, earliest)
        due = needs[0] if decision.ready < 0 else decision.ready
        self.transfers.append(Transfer(block.storage, nbytes, "d2h", issue, decision.release))
        self.transfers.append(Transfer(block.storage, nbytes, "h2d", decision.prefetch, due))

    def _written(self, what: str) -> int:
        """The task that makes the payload complete. The dense form may leave while its reader runs."""
        payload = -1 if what == "dense" else self.block.saved
        return max(payload, self.context.index.written.get(self.block.id, -1))

    def _pending(self, first: int, last: int, nbytes: int, what: str) -> None:
        """A payload; of a sparse one on CUDA the worst-case scratch until its size is known (runtime.exact)."""
        if not (is_sparse(self.decision.codec) and self.costs.hardware.async_counts):
            return self._add(first, last, nbytes, what)
        settled = self.context.scratch_end(first)
        measures = (self.decision.codec, self.block.nbytes, self.block.dtype, self.density)
        scratch_bytes, packing_bytes = self.costs.scratch_bytes(*measures)
        end, to_host = last if settled is None else min(settled, last), self.decision.place == "host"
        if settled is None and packing_bytes and self.values and not to_host:
            # packed before its first use, when there is room for what is decoded then
            end, settled = self.values[0], self.values[0] + 1
            decoded_bytes = 0 if end in self.lent else self._decoded_bytes(end)
            packing_bytes = max(0, nbytes + packing_bytes - decoded_bytes)
        self._add(first, end, scratch_bytes, "scratch")
        if self.context.least and settled is not None:
            packing_bytes, settled = to_host * packing_bytes, end + 1
        if to_host:
            self._add(first, first, nbytes + packing_bytes, what)  # packed at once, beside the scratch, to be sent
            settled = None if settled is None else max(settled, first + 1)
        elif settled is not None:
            self._add(end, end, packing_bytes, "scratch")
        if settled is not None:
            self._add(settled, last, nbytes, what)


def _made_by_its_op(block: Block) -> bool:
    """Whether a block is made and kept by one call and read by no other: a dropout's mask."""
    return block.first == block.last == block.saved
