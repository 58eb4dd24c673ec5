"""The backward half of ``tests.support.step_graphs.Step``: tasks, gradients and the uses of saved blocks, as autograd
has them.

While a step is built, blocks are numbered by storage, gradients come after them. A gradient is summed in place where
its memory belongs to one value alone, as autograd does it.
"""

from dataclasses import dataclass, field, replace

from gistkit.ir.tasks import BEFORE, Block, Task, Use

PARAMETRIC = ("conv2d", "linear", "batch_norm")
OUTLIVING = ("weight", "buffer", "input", "weight_gradient")
"""Kinds that are there when the step is over."""


@dataclass
class Life:
    """A block under construction."""

    kind: str
    nbytes: int
    first: int
    storage: int = -1
    last: int = BEFORE
    saved: int = -1
    uses: list[Use] = field(default_factory=list)
    holder: int = -1
    dtype: str = "float32"
    name: str = ""

    def block(self, number, end, outlives=False):
        """The block of that number in a step of ``end`` tasks."""
        last = end if outlives or self.kind in OUTLIVING else self.last
        uses = tuple(sorted(self.uses, key=lambda u: u.task))
        told = (self.holder, self.dtype, self.name)
        return Block(number, self.kind, self.nbytes, self.storage, self.first, last, self.saved, uses, *told)


class Backward:
    """Runs through the calls of a step in reverse."""

    def __init__(self, step):
        self.step = step
        self.grads = {}  # (storage, version) -> block of its gradient
        self.trained = {(step.of(v), step.values[v].version) for v in _trained(step)}

    def key(self, value):
        return (self.step.of(value), self.step.values[value].version)

    def block(self, kind, like, first):
        storage = self.step.storages[self.step.of(like)]
        self.step.lives.append(Life(kind, storage.nbytes, first, last=first, name=f"d_{storage.id}"))
        return len(self.step.lives) - 1

    def task(self, call, reads, writes, part="", flops=0, keep=()):
        """Add a task; keep: (value, values needed?) of the saved storages that it needs."""
        step, forward = self.step, self.step.tasks[call]
        index = len(step.tasks)
        blocks = tuple(dict.fromkeys((*reads, *(step.of(v) for v, _ in keep))))
        for b in (*reads, *writes):
            step.lives[b].last = index
        for value, values in keep:
            life = step.lives[step.of(value)]
            life.uses.append(Use(index, values))
        moved = sum(step.lives[b].nbytes for b in (*blocks, *writes))
        where = (index, "backward", forward.op, call, forward.module, blocks, tuple(writes), flops, moved)
        step.tasks.append(Task(*where, part=part, conv=forward.conv))
        for save in step.calls[call].saves:
            step.lives[save.storage].holder = index
        return index

    def gradient(self, value, task):
        """The block that a task writes its contribution to a value's gradient into."""
        key, new = self.key(value), self.block("gradient", value, task)
        old = self.grads.get(key)
        shared = old is not None and sum(b == old for b in self.grads.values()) > 1
        if old is not None and not shared:
            self.step.lives[old].last = max(self.step.lives[old].last, task)
            return (new, old)
        self.grads[key] = new
        return (new,) if old is None else (new, old)

    def passed(self, value, block, task):
        """A gradient that is passed on as it is."""
        old = self.grads.get(self.key(value))
        if old is None:
            self.grads[self.key(value)] = block
            return
        total = self.block("gradient", value, task)
        self.grads[self.key(value)] = total
        self.step.lives[old].last = max(self.step.lives[old].last, task)
        sums = self.step.tasks[task]
        self.step.tasks[task] = replace(sums, reads=(*sums.reads, old), writes=(*sums.writes, total))


def backward(step):
    """Append the backward tasks of all calls to the step."""
    run = Backward(step)
    for op, call, operands, result in reversed(step.nodes):
        if op != "mean" and (run.key(result) not in run.grads or run.key(result) not in run.trained):
            continue
        dy = () if op == "mean" else (run.grads[run.key(result)],)
        if run.key(operands[0]) != run.key(result):
            run.grads.pop(run.key(result), None)
        _node(run, op, call, operands, result, dy)


def _node(run, op, call, operands, result, dy):
    step, index = run.step, len(run.step.tasks)
    x = operands[0]
    if op in ("conv2d", "linear"):
        _product(run, op, call, operands, dy)
    elif op in ("add", "cat"):  # the latter's are views of the sum's gradient
        task = run.task(call, dy, ())
        for operand in operands:
            if run.key(operand) in run.trained:
                run.passed(operand, dy[0], task)
    elif op == "flatten":
        run.task(call, dy, ())
    else:
        made = [s.value for s in step.calls[call].saves if s.read and s.field != "weight"]
        keep = [(v, op != "relu") for v in made]
        extra = [run.block("weight_gradient", v, index) for v in operands[3:]] if op == "batch_norm" else []
        if op == "batch_norm":
            keep.append((operands[3], True))
        run.task(call, dy, (*run.gradient(x, index), *extra), keep=keep)


def _product(run, op, call, operands, dy):
    """A convolution or linear: the weight gradient, then the input gradient where somebody wants it."""
    x, weight, bias = operands
    flops = run.step.tasks[call].flops
    grads = [run.block("weight_gradient", v, len(run.step.tasks)) for v in (weight, bias)]
    run.task(call, dy, grads, "weight", flops, [(x, True)])
    if run.key(x) in run.trained:
        run.task(call, dy, run.gradient(x, len(run.step.tasks)), "input", flops, [(weight, True)])


def _trained(step):
    """Values through which a gradient flows."""
    flows = set()
    for op, _, operands, result in step.nodes:
        keys = {(step.of(v), step.values[v].version) for v in operands}
        if op in PARAMETRIC or keys & {(step.of(v), step.values[v].version) for v in flows}:
            flows.add(result)
    return flows
