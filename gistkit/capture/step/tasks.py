"""From a traced step to the tasks and blocks of a SavedGraph."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import torch

from gistkit.capture.calls import pair
from gistkit.capture.ledger import Notes
from gistkit.capture.step.gradients import reading_halves, split_calls, weight_gradients
from gistkit.capture.step.trace import ACCUMULATE, Seen, Span, Tracer
from gistkit.ir import BACKWARD, BEFORE, FORWARD, Block, ConvShape, SavedGraph, Task, Use, summed

_KINDS = {"parameter": "weight", "buffer": "buffer", "input": "input"}


class StepBuilder:
    """The tasks and blocks of a traced step; ``gradients`` are the parameters' own, ``held`` the storages of the
    model's output, which a variable held until now."""

    def __init__(
        self,
        graph: SavedGraph,
        notes: Notes,
        tracer: Tracer,
        gradients: Iterable[torch.Tensor],
        held: Collection[int] = (),
    ) -> None:
        self.graph, self.notes, self.tracer, self._held = graph, notes, tracer, held
        self.gradients = {t.untyped_storage()._cdata for t in gradients}
        self._ranges = sorted((c.lo, c.hi, c.number) for c in notes.calls)
        self._calls = [self._call_of(span) for span in tracer.spans]
        self._split = split_calls(notes)
        self.of_weights = weight_gradients(graph, notes, tracer, self._calls, self.gradients)
        self.tasks: list[Task] = []
        self.first_task: list[int] = []  # by span: its first task, that of the span before where it has none
        self.last_task: list[int] = []
        self.block_of: dict[int, int] = {}  # by Seen.id

    def tasks_with_spans(self) -> list[tuple[Task, Span]]:
        """The tasks in order, without their blocks, each with the span that it is, or is half of."""
        found = []
        for number, span in enumerate(self.tracer.spans):
            found += [(task, span) for task in self._tasks_of(number)]
        return found

    def build(self, batch: int) -> SavedGraph:
        self.tasks_with_spans()
        self.blocks = self._blocks()
        self._storages = {b.storage: b.id for b in self.blocks if b.storage >= 0}
        self._saves()
        self._link()
        return replace(self.graph, tasks=tuple(self.tasks), blocks=tuple(self.blocks), batch=batch)

    def _call_of(self, span: Span) -> int:
        phase, number, _ = span.key
        if number is None or phase == "loss":
            return -1
        if phase == FORWARD:
            return self.notes.index.get(number, -1)
        hidden = self.notes.index.get(("node", number))
        at = bisect_right(self._ranges, number, key=lambda r: r[0]) - 1
        if hidden is not None or at < 0:
            return -1 if hidden is None else hidden
        # several calls may begin at one number, those without a node of their own first
        _, hi, owner = self._ranges[at]
        return self.notes.index.get(owner, -1) if number < hi else -1

    def _tasks_of(self, number: int) -> list[Task]:
        span, start = self.tracer.spans[number], len(self.tasks)
        if span.writes:
            call = self._calls[number]
            phase = BACKWARD if span.key[0] == BACKWARD else FORWARD
            of = self.graph.calls[call] if call >= 0 else None
            op, module = (_plain_name(span), "") if of is None else (of.op, of.module)
            work = span.flops, span.moved_bytes, span.dtype
            task = Task(start, phase, op, call, module, (), (), *work, conv=_conv(span), draws=span.draws)
            split = phase == BACKWARD and call in self._split
            self.tasks.extend(self._halves(task, span) if split else [task])
        last = max(0, len(self.tasks) - 1)
        self.first_task.append(min(start, last))
        self.last_task.append(last)
        return self.tasks[start:]

    def _halves(self, task: Task, span: Span) -> list[Task]:
        """The weight gradient and the input gradient of a convolution's or linear's backward, as far as both exist."""
        weights = self.of_weights.intersection(span.writes)
        others = span.writes.keys() - self.of_weights
        forward = next((t.conv for t in self.tasks if t.call == task.call and t.phase == FORWARD), None)
        if not weights or not others:
            return [replace(task, part="weight" if weights else "input", conv=forward)]
        half = replace(task, flops=task.flops // 2, moved_bytes=task.moved_bytes // 2, conv=forward)
        return [replace(half, part="weight"), replace(half, index=task.index + 1, part="input")]

    def _blocks(self) -> list[Block]:
        blocks: list[Block] = []
        for item in self.tracer.seen:
            if item.stand_in is not None or item.nbytes == 0 or (item.first >= 0 and item.last < 0):
                continue
            entry = self.notes.ledger.known(item.ref.cdata)
            if entry is None and item.first == item.last and item.first >= 0 and item.ref.expired():
                continue  # made and gone within one span: part of its transient bytes, those of its worst moment
            self.block_of[item.id] = len(blocks)
            first, last = self._life(item)
            read = last
            if entry is not None and entry.id in self.tracer.dropped:
                dropped = self.tracer.dropped[entry.id]
                last = max(last, len(self.tasks) if dropped == len(self.last_task) else self.last_task[dropped])
            storage, kind = (-1, None) if entry is None else (entry.id, entry.kind)
            name = self.tasks[first].module or self.tasks[first].op if first >= 0 else ""
            life = storage, first, last
            made = Block(len(blocks), self._kind(item, kind), item.nbytes, *life, dtype=item.dtype, name=name)
            if item.ref.cdata in self._held and item.first >= 0 and item.ref.expired():
                made = replace(made, released=max(t.index for t in self.tasks if t.phase != BACKWARD))
            blocks.append(replace(made, read=read) if read < last else made)
        return blocks

    def _life(self, item: Seen) -> tuple[int, int]:
        end = len(self.tasks)
        if item.first < 0:
            return BEFORE, end
        stays = item.ref.cdata in self.gradients or item.ref.cdata in self._held
        outlives = stays or not (item.cast or item.ref.expired())
        first = self.first_task[item.first]
        span = self.tracer.spans[item.first]
        if self.last_task[item.first] > first and item.id not in self.of_weights and item.id in span.writes:
            first = self.last_task[item.first]  # the input gradient comes second
        return first, end if outlives else max(first, self.last_task[item.last])

    def _kind(self, item: Seen, kind: str | None) -> str:
        if item.first < 0:
            return _KINDS.get(kind or "input", "input")
        if item.ref.cdata in self.gradients:
            return "weight_gradient"
        return "gradient" if self.tracer.spans[item.first].key[0] == BACKWARD else "activation"

    def _saves(self) -> None:
        of_node: dict[int, int] = {}
        for span, first in zip(self.tracer.spans, self.first_task, strict=True):
            if span.key[0] == BACKWARD and span.key[1] is not None and span.writes:
                of_node.setdefault(span.key[1], first)
        inputs = {first for s, first in zip(self.tracer.spans, self.first_task, strict=True) if s.reads_input}
        forward = {t.call: t.index for t in self.tasks if t.phase == FORWARD}
        uses: dict[int, dict[int, bool]] = defaultdict(dict)
        held: dict[int, set[int | None]] = defaultdict(set)
        for call, node, save in self.notes.holds:
            block, task = self._storages.get(save.storage), of_node.get(node)
            if block is None or self.blocks[block].kind not in ("activation", "input"):
                continue
            old = self.blocks[block]
            since = forward.get(call, max(0, old.first))
            saved = since if old.saved < 0 else min(old.saved, since)
            holder = old.holder if task is None else max(old.holder, task)
            self.blocks[block] = replace(old, saved=saved, holder=holder)
            held[block].add(task)
            if task is not None and save.read:
                own = self.graph.calls[call].op == "relu" and save.field == "result"
                parts = [t.part for t in self.tasks[task : task + 2]]
                for half in reading_halves(parts, save.field, task in inputs):
                    uses[block][task + half] = uses[block].get(task + half, False) or not own
        for block, tasks in self._unpacked():
            if tasks[0] == tasks[-1] and tasks[0] in held[block]:
                continue
            values = not (len(tasks) == 1 and self._on_linear(self.tasks[tasks[0]]))
            uses[block].update(dict.fromkeys(tasks, values))
            self.blocks[block] = replace(self.blocks[block], holder=max(self.blocks[block].holder, tasks[-1]))
        for block, tasks in uses.items():
            found = tuple(Use(task, values) for task, values in sorted(tasks.items()))
            self.blocks[block] = replace(self.blocks[block], uses=found)
        casts = {self.block_of.get(i.id) for i in self.tracer.seen if i.cast}
        weights = {s.id for s in self.graph.storages if s.kind == "parameter"}
        for b in self.blocks:
            if b.id in casts or (b.saved >= 0 and b.storage in weights):
                # autocast's copy of a parameter, which the runtime keeps as it is: there until its last node has run
                last = max(b.last, b.holder, *(u.task for u in b.uses))
                kept = {"kind": "weight", "last": last, "read": -1, "saved": -1, "uses": (), "holder": -1}
                self.blocks[b.id] = replace(b, **kept)

    def _unpacked(self) -> Iterator[tuple[int, range]]:
        """Blocks with the backward tasks during which what a node unpacked of them was there: one task mostly. A
        checkpoint's inputs are kept by the forward that runs again, an in-place op on a view runs in its CopySlices."""
        for item in self.tracer.seen:
            if item.stand_in is None or item.unpacked < 0:
                continue
            block = self._storages.get(item.stand_in)
            if block is not None and self.blocks[block].saved >= 0:
                first, last = self.first_task[item.unpacked], self.first_task[max(item.unpacked, item.last)]
                yield block, range(first, last + 1)

    def _link(self) -> None:
        counted = self._counted()
        weights = {self.block_of[i] for i in self.of_weights if i in self.block_of}
        for number, span in enumerate(self.tracer.spans):
            if not span.writes:
                continue
            first, last = self.first_task[number], self.last_task[number]
            reads = self._ids(i for i in span.reads if self.tracer.seen[i].first != number)
            writes = self._ids(span.writes)
            for index in range(first, last + 1):
                task = self.tasks[index]
                mine = writes
                if first != last:
                    mine = tuple(b for b in writes if (b in weights) == (task.part == "weight"))
                read = reads
                if task.part == "input":  # is made of weights, and of maps that it uses
                    maps = {b for b in reads if self.blocks[b].kind in ("activation", "input")}
                    used = {b for b in maps if any(u.task == index for u in self.blocks[b].uses)}
                    read = tuple(b for b in reads if b not in maps or b in used)
                transient = max(0, span.peak_bytes - counted[number]) if index == last else 0
                plain = transient if self._on_linear(task) else 0
                ours = transient - plain + (span.unasked_bytes if index == first else 0)
                plain += span.unasked_bytes if index > first else 0  # PyTorch's own node is both halves in one
                self.tasks[index] = replace(task, reads=read, writes=mine, transient_bytes=ours, plain_bytes=plain)

    def _on_linear(self, task: Task) -> bool:
        """Whether this is the backward of a ReLU in place on what a linear has just made: from three dimensions on a
        view in PyTorch, whose node copies gradients; gistkit's linear makes none (nn.linear)."""
        if task.phase != BACKWARD or task.op != "relu" or not self.graph.calls[task.call].inplace:
            return False
        relu = self.graph.calls[task.call]
        made = self.graph.values[relu.operands[0]]
        linear = self.graph.calls[made.producer] if made.producer >= 0 else relu
        between = (c for c in self.graph.readers(made.storage) if linear.index < c.index < relu.index)
        return linear.op == "linear" and linear.index in self._split and relu.covered >= 0 and not any(between)

    def _ids(self, seen: Iterable[int]) -> tuple[int, ...]:
        items = (self.tracer.seen[i] for i in seen)
        stored = self._storages
        found = (stored.get(s.stand_in) if s.stand_in is not None else self.block_of.get(s.id) for s in items)
        return tuple(dict.fromkeys(block for block in found if block is not None))

    def _counted(self) -> list[int]:
        """By span: bytes of the blocks that the tracer counted as living during it."""
        made = (i for i in self.tracer.seen if i.id in self.block_of and i.first >= 0)
        return summed(((i.first, i.last, i.nbytes) for i in made), len(self.tracer.spans))


def _plain_name(span: Span) -> str:
    if span.key[0] == "loss" or span.key[2] == ACCUMULATE:
        return "loss" if span.key[0] == "loss" else "accumulate"
    name = span.key[2] or next((op for op in span.ops if op.startswith("aten::")), "")
    return name.removeprefix("aten::")


def _conv(span: Span) -> ConvShape | None:
    """The shape of a two-dimensional convolution; None for anything else."""
    if span.conv is None or len(span.conv[0]) != 4:
        return None
    (n, c, h, w), (k, _, *kernel), (_, _, out_h, out_w), stride, _, dilation, groups = span.conv
    return ConvShape(n, c, h, w, k, out_h, out_w, pair(kernel), pair(stride), pair(dilation), groups)
