"""Networks, a step and partitioners for the tests of the compiled path."""

import copy
import warnings
from contextlib import contextmanager
from functools import cache, partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from gistkit.compiled.split import Pair

with warnings.catch_warnings():  # PyTorch's own, of torch.jit
    warnings.simplefilter("ignore")
    import torch._inductor.compile_fx


def conv_net():
    """Convolution, batch norm, ReLU and max-pool, twice."""
    first = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(256, 10))


def vgg_like(widths=(8, 16)):
    """Two convolutions with ReLU before each max-pool, then a hidden layer with dropout."""
    parts, channels = [], 3
    for width in widths:
        for _ in range(2):
            parts += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        parts.append(nn.MaxPool2d(2))
    pixels = 16 * 16 // 4 ** len(widths)
    hidden = nn.Linear(channels * pixels, 32), nn.ReLU(), nn.Dropout(0.25)
    return nn.Sequential(*parts, nn.Flatten(), *hidden, nn.Linear(32, 10))


class Residual(nn.Module):
    """A basic block of a ResNet."""

    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout)
        self.conv2, self.bn2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False), nn.BatchNorm2d(cout)
        same = stride == 1 and cin == cout
        self.down = nn.Identity() if same else nn.Sequential(nn.Conv2d(cin, cout, 1, stride), nn.BatchNorm2d(cout))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.down(x))


def resnet(*blocks):
    """A stem with an overlapping max-pool and residual blocks, two by default."""
    stem = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    blocks = blocks or (Residual(8, 8), Residual(8, 16, 2))
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(blocks[-1].bn2.num_features, 10)
    )


class Block(nn.Module):
    """A transformer's block, causal, with dropout."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + F.dropout(self.out(y), 0.1, self.training)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Blocks over an embedding of 16 x 16 images' rows; classifies from the mean."""

    def __init__(self, width=32, depth=2):
        super().__init__()
        self.embed, self.blocks = nn.Linear(48, width), nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x):
        rows = x.permute(0, 2, 1, 3).flatten(2)
        return self.head(self.norm(self.blocks(self.embed(rows))).mean(1))


NETS = {"conv": conv_net, "vgg": vgg_like, "resnet": resnet, "transformer": Transformer}
NETS |= {
    "one conv": lambda: nn.Sequential(*conv_net()[:4], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)),
    "stage": lambda: nn.Sequential(*vgg_like((8,))[:6], nn.Linear(512, 10)),
    "residual": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), Residual(8, 8), nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(512, 10)
    ),
    "block": lambda: Transformer(depth=1),
}


def case(name, rows=8):
    """A network, images of 16 x 16 and labels; always the same."""
    torch.manual_seed(3)
    return NETS[name](), torch.randn(rows, 3, 16, 16), torch.randint(10, (rows,))


def loss_of(model, x, y):
    """The loss of a classifier."""
    return F.cross_entropy(model(x), y)


def step(model, x, y, forward, seed=1):
    """The loss and all gradients of one step, with the seed set before."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = forward(model, x, y)
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]


def fresh_step(model, x, y, forward, seed=1):
    """The same of a copy of the model, buffers behind the gradients."""
    twin = copy.deepcopy(model)
    return [*step(twin, x, y, forward, seed), *(b.clone() for b in twin.buffers())]


def assert_same(some, others):
    """Equal in every bit."""
    assert len(some) == len(others)
    assert [i for i, (a, b) in enumerate(zip(some, others, strict=True)) if not torch.equal(a, b)] == []


def _runnable(graph, *_, **__):
    """A graph that runs as it is; what is decoded in another layout is reshaped, as by Inductor."""
    torch._inductor.compile_fx.view_to_reshape(graph)
    graph.recompile()
    return make_boxed_func(graph)


def backend_over(partition=None):
    """A backend that runs a partitioner's graphs (PyTorch's by default) as they are, decomposed by Inductor."""
    return aot_autograd(
        fw_compiler=_runnable,
        bw_compiler=_runnable,
        inference_compiler=_runnable,
        partition_fn=partition or min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,  # as Inductor has it
    )


@contextmanager
def graphs_run_as_they_are():
    """Inductor without its code: decompositions, passes and partitioner, whose graphs run as they are."""
    inductor = torch._inductor.compile_fx
    with (
        patch.object(inductor, "compile_fx", partial(inductor.compile_fx, inner_compile=_runnable)),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


def run_edited(edit, model, x, y, dynamic=False):
    """A step over graphs that ``edit`` changed."""

    def cut(joint, inputs, *, num_fwd_outputs, **words):
        pair = Pair(
            *min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **words),
            num_fwd_outputs,
        )
        edit(pair)
        pair.finish()
        return pair.forward, pair.backward

    torch._dynamo.reset()
    backend = backend_over(None if edit is None else cut)
    return fresh_step(model, x, y, torch.compile(loss_of, backend=backend, fullgraph=True, dynamic=dynamic))


@cache
def plain_step(name, rows=8):
    """A case's step over PyTorch's own cut."""
    return run_edited(None, *case(name, rows))
