"""Synthetic graphs of whole training steps, without a network: what the planner's tests draw and compute on.

``Step`` makes the SavedGraph that a capture of the same network with its backward would give: calls, storages, values,
saves under autograd's names, tasks and blocks. ``chain``, ``forked`` and ``pooled`` are small networks of it,
``step_graphs`` is a hypothesis strategy. Block ids differ from storage ids on purpose.
"""

from dataclasses import replace
from math import prod

from hypothesis import strategies as st

from gistkit.ir.saved_graph import Call, Save, SavedGraph, SavedStorage, Value
from gistkit.ir.tasks import BEFORE, ConvShape, Task
from tests.support.step_backward import Life, backward

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int64": 8}
WINDOW = {"stride": [2, 2], "padding": [0, 0], "dilation": [1, 1], "ceil_mode": False}


class Step:
    """A step under construction; every method adds one call and returns the id of the value that it made."""

    def __init__(self, batch=2, dtype="float32"):
        self.batch, self.dtype = batch, dtype
        self.calls, self.storages, self.values, self.tasks, self.lives, self.nodes = [], [], [], [], [], []
        self.covered = 0

    def storage(self, shape, kind="activation", dtype=""):
        dtype = dtype or self.dtype
        nbytes = prod(shape) * ITEM_BYTES[dtype]
        producer = len(self.calls) if kind == "activation" else -1
        self.storages.append(SavedStorage(len(self.storages), nbytes, dtype, shape, kind, producer))
        s = self.storages[-1]
        life = {"parameter": "weight", "buffer": "buffer"}.get(kind, kind)
        first = BEFORE if producer < 0 else producer
        self.lives.append(Life(life, s.nbytes, first, s.id, first, dtype=dtype, name=f"{kind}{s.id}"))
        return self.value(s.id, shape, 0, producer)

    def value(self, storage, shape, version, producer):
        dtype = self.storages[storage].dtype
        self.values.append(Value(len(self.values), storage, version, shape, dtype, True, producer))
        return len(self.values) - 1

    def shape(self, value):
        return self.values[value].shape

    def of(self, value):
        return self.values[value].storage

    def saved_storages(self):
        return {s.storage for c in self.calls for s in c.saves}

    def input(self, *shape):
        return self.storage((self.batch, *shape), "input")

    def _call(self, op, operands, made, saves=(), *, covered=True, inplace=False, options=None, flops=0, conv=None):
        """Add a call with its forward task; made: value ids of new storages, the result first; saves: (node, field,
        value, read). ``inplace`` and views make a new value of the operand's storage themselves."""
        index, reads = len(self.calls), tuple(dict.fromkeys(self.of(v) for v in operands))
        writes = tuple(self.of(v) for v in made)
        number = self.covered if covered else -1
        self.covered += covered
        notes = tuple(
            Save(self.of(v), node, name, self.shape(v), self.storages[self.of(v)].dtype, read, v)
            for node, name, v, read in saves
        )
        touched = (reads, writes, notes, inplace, options, tuple(operands), tuple(made[:1]))
        self.calls.append(Call(index, op, number, f"{op}{index}", *touched))
        moved = sum(self.storages[s].nbytes for s in reads + writes)
        self.tasks.append(Task(index, "forward", op, index, f"{op}{index}", reads, writes, flops, moved, conv=conv))
        for s in reads + writes:
            self.lives[s].last = index
        for note in notes:
            life = self.lives[note.storage]
            life.saved = index if life.saved < 0 else life.saved
        self.nodes.append((op, index, tuple(operands), made[0]))
        return made[0]

    def conv(self, x, channels, kernel=3, stride=1):
        n, c, h, w = self.shape(x)
        out = (n, channels, (h - 1) // stride + 1, (w - 1) // stride + 1)
        weight, bias = self.storage((channels, c, kernel, kernel), "parameter"), self.storage((channels,), "parameter")
        y = self.storage(out)
        shape = ConvShape(n, c, h, w, channels, out[2], out[3], (kernel, kernel), (stride, stride))
        around = [kernel // 2] * 2
        options = {"stride": [stride] * 2, "padding": around, "dilation": [1, 1], "groups": 1}
        saves = (("ConvolutionBackward0", "input", x, True), ("ConvolutionBackward0", "weight", weight, True))
        flops = 2 * prod(out) * c * kernel * kernel
        return self._call("conv2d", (x, weight, bias), (y,), saves, options=options, flops=flops, conv=shape)

    def linear(self, x, features):
        n, width = self.shape(x)
        weight, bias = self.storage((features, width), "parameter"), self.storage((features,), "parameter")
        y = self.storage((n, features))
        saves = (("AddmmBackward0", "mat1", x, True), ("AddmmBackward0", "mat2", weight, True))
        return self._call("linear", (x, weight, bias), (y,), saves, options={}, flops=2 * n * width * features)

    def relu(self, x, inplace=False):
        if inplace:
            old = self.values[x]
            y = self.value(old.storage, old.shape, old.version + 1, len(self.calls))
        else:
            y = self.storage(self.shape(x))
        saves = (("ReluBackward0", "result", y, True),)
        return self._call("relu", (x,), (y,), saves, inplace=inplace, options={"inplace": inplace})

    def batch_norm(self, x):
        width = self.shape(x)[1]
        weight, bias = self.storage((width,), "parameter"), self.storage((width,), "parameter")
        mean, var = self.storage((width,), "buffer"), self.storage((width,), "buffer")
        y, stat1, stat2 = self.storage(self.shape(x)), self.storage((width,)), self.storage((width,))
        node = "NativeBatchNormBackward0"
        saves = ((node, "input", x, True), (node, "weight", weight, True))
        saves += ((node, "result1", stat1, True), (node, "result2", stat2, True))
        options = {"training": True, "momentum": 0.1, "eps": 1e-05}
        return self._call("batch_norm", (x, mean, var, weight, bias), (y, stat1, stat2), saves, options=options)

    def max_pool(self, x):
        n, c, h, w = self.shape(x)
        y = self.storage((n, c, h // 2, w // 2))
        index = self.storage((n, c, h // 2, w // 2), dtype="int64")
        node = "MaxPool2DWithIndicesBackward0"
        saves = ((node, "self", x, False), (node, "result1", index, True))
        return self._call("max_pool2d", (x,), (y, index), saves, options={"kernel_size": [2, 2], **WINDOW})

    def dropout(self, x):
        y, mask = self.storage(self.shape(x)), self.storage(self.shape(x))
        options = {"p": 0.5, "training": True, "inplace": False}
        return self._call("dropout", (x,), (y, mask), (("MulBackward0", "other", mask, True),), options=options)

    def add(self, a, b):
        y = self.storage(self.shape(a))
        return self._call("add", (a, b), (y,), options={"alpha": 1, "inplace": False})

    def cat(self, a, b):
        """Of channels."""
        n, c, *plane = self.shape(a)
        y = self.storage((n, c + self.shape(b)[1], *plane))
        return self._call("cat", (a, b), (y,), options={"dim": 1}, covered=False)

    def flatten(self, x):
        old, shape = self.values[x], self.shape(x)
        y = self.value(old.storage, (shape[0], prod(shape[1:])), old.version, len(self.calls))
        self._call("flatten", (x,), (y,), covered=False)
        self.calls[-1] = replace(self.calls[-1], writes=())
        self.tasks[-1] = replace(self.tasks[-1], writes=(), moved_bytes=0)
        return y

    def finish(self, x):
        """The graph of the step that ends in the mean of x, with its backward."""
        loss = self._call("mean", (x,), (self.storage(()),), covered=False)
        self.storages[self.of(loss)] = replace(self.storages[self.of(loss)], escapes=True)
        backward(self)
        end = len(self.tasks)
        order = sorted(range(len(self.lives)), key=lambda i: (self.lives[i].kind not in ("weight", "buffer"), i))
        number = {old: new for new, old in enumerate(order)}
        blocks = tuple(self.lives[i].block(number[i], end, i == self.of(loss)) for i in order)
        tasks = tuple(
            replace(t, reads=tuple(number[b] for b in t.reads), writes=tuple(number[b] for b in t.writes))
            for t in self.tasks
        )
        calls, storages, values = tuple(self.calls), tuple(self.storages), tuple(self.values)
        return SavedGraph(calls, storages, "fake", values, tasks, blocks, self.batch)


def chain(layers=4, channels=4, size=16, batch=2):
    """conv, relu, conv, relu, ...: every ReLU output is read by its own ReLU and by the next convolution."""
    step = Step(batch)
    x = step.input(3, size, size)
    for _ in range(layers):
        x = step.relu(step.conv(x, channels))
    return step.finish(x)


def pooled(channels=4, size=16, batch=2):
    """A small VGG: conv, relu, conv, relu, pool, conv, relu in place, pool, dropout, flatten, linear."""
    step = Step(batch)
    x = step.input(3, size, size)
    x = step.max_pool(step.relu(step.conv(step.relu(step.conv(x, channels)), channels)))
    x = step.max_pool(step.relu(step.conv(x, 2 * channels), inplace=True))
    return step.finish(step.linear(step.flatten(step.dropout(x)), 10))


def forked(blocks=2, channels=4, size=16, batch=2):
    """Residual blocks with batch norm: conv, bn, relu in place, conv, bn, add, relu."""
    step = Step(batch)
    x = step.relu(step.batch_norm(step.conv(step.input(3, size, size), channels)), inplace=True)
    for _ in range(blocks):
        y = step.relu(step.batch_norm(step.conv(x, channels)), inplace=True)
        x = step.relu(step.add(step.batch_norm(step.conv(y, channels)), x))
    return step.finish(x)


@st.composite
def step_graphs(draw, max_tensors=8, size=16, grown=False, varied=False):
    """Steps with at most ``max_tensors`` (at least 3) activations and inputs kept for backward, statistics of a batch
    norm not counted. Forks come from additions of an earlier value. ``grown``: with as many tensors as may be (bar one,
    or two where the last operations keep none). ``varied``: in bf16 too, with concatenations and operations that
    nothing comes of."""
    step = Step(draw(st.integers(1, 3)), draw(st.sampled_from(tuple(ITEM_BYTES)[: 1 + varied])))
    grow = _grow_varied if varied else _grow
    values = [step.conv(step.input(3, size, size), draw(st.sampled_from((4, 8))))]
    for _ in range(2 * max_tensors if grown else draw(st.integers(1, 2 * max_tensors))):
        if tensors(step) + 2 > max_tensors:
            break
        grow(draw, step, values)
    return step.finish(values[-1])


def tensors(step):
    """Activations and inputs kept so far that are more than a statistic."""
    wide = (s for s in step.storages if s.kind in ("input", "activation") and len(s.shape) > 1)
    return len({s.id for s in wide} & step.saved_storages())


def _grow(draw, step, values):
    """One more operation on the last value; what it overwrites can be read by nobody after it."""
    x = values[-1]
    op = draw(st.sampled_from(("conv", "relu", "relu", "relu_", "pool", "norm", "dropout", "add")))
    if op == "relu_" and step.of(x) not in step.saved_storages():
        values[:] = [v for v in values if step.of(v) != step.of(x)]
        values.append(step.relu(x, inplace=True))
    elif op == "add":
        same = [v for v in values if step.shape(v) == step.shape(x)]
        values.append(step.add(x, draw(st.sampled_from(same))))
    elif op == "pool" and step.shape(x)[2] >= 8:
        values.append(step.max_pool(x))
    elif op == "norm":
        values.append(step.batch_norm(x))
    elif op == "dropout":
        values.append(step.dropout(x))
    elif op == "conv":
        values.append(step.conv(x, draw(st.sampled_from((4, 8))), draw(st.sampled_from((1, 3)))))
    else:
        values.append(step.relu(x))


def _grow_varied(draw, step, values):
    """A concatenation, or one more operation, at times on an earlier value, whose result nothing may come of."""
    x = values[-1]
    same = [v for v in values if step.shape(v)[2:] == step.shape(x)[2:]]
    if draw(st.integers(0, 3)) == 0:
        values.append(step.cat(x, draw(st.sampled_from(same))))
    elif draw(st.booleans()):
        _grow(draw, step, values)
    else:
        _grow(draw, step, [draw(st.sampled_from(values))])
