"""One of two processes that run compiled steps under DistributedDataParallel and fully_shard: what each step gave."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gistkit
from tests.support.compiled_cases import graphs_run_as_they_are  # imports Inductor, past its warnings
from tests.support.distributed_cases import whole

WIDTH, BLOCKS = 256, 2


class Block(nn.Module):
    """A residual block with a batch norm. From the last operator back to its first linear layer its parameters fill a
    bucket of 1 MiB, so that Dynamo splits the graph into blocks; its kernels are then those of a block by itself."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return x + self.norm(self.down(F.gelu(self.up(x))))


class Net(nn.Module):
    """Blocks, in a class of its own: Dynamo runs the frame of a Sequential as it is."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def network():
    """The network, always the same."""
    torch.manual_seed(0)
    return Net()


def around(model, compiled):
    """Compiled outside: Dynamo splits the graph where a bucket of gradients is full."""
    return compiled(DistributedDataParallel(model, bucket_cap_mb=1))


def inside(model, compiled):
    """Compiled inside: the same splitting, the same kernels."""
    return DistributedDataParallel(compiled(model), bucket_cap_mb=1)


def sharded_first(model, compiled):
    """fully_shard of each block, then compilation, block by block."""
    mesh = init_device_mesh("cpu", (2,))
    for i, block in enumerate(model.blocks):
        model.blocks[i] = compiled(fully_shard(block, mesh=mesh))
    return fully_shard(model, mesh=mesh)


def compiled_first(model, compiled):
    """Compilation of each block, then fully_shard, block by block."""
    mesh = init_device_mesh("cpu", (2,))
    for i, block in enumerate(model.blocks):
        model.blocks[i] = fully_shard(compiled(block), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compressed(model):
    """torch.compile of a model that gistkit.compress has compressed; of a wrapper: the model within."""
    gistkit.compress(getattr(model, "module", model))
    return torch.compile(model)


WAYS = {"torch": torch.compile, "gistkit": gistkit.compile, "compressed": compressed}
CASES = [
    (around, "torch"), (around, "gistkit"), (around, "compressed"), (inside, "gistkit"), (compiled_first, "torch"),
    (compiled_first, "gistkit"), (sharded_first, "gistkit"),
]  # fmt: skip


def train(model, x):
    """Losses of two steps, the last gradients, parameters and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for batch in x:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach().clone())
    gradients = [whole(p.grad) for p in model.parameters()]
    return found + gradients + [whole(t) for t in (*model.parameters(), *model.buffers())]


def case(wrap, how, x):
    """What the steps gave, and of a report: graphs, bytes under torch.compile and here."""
    torch._dynamo.reset()
    model = network()
    found = train(wrap(model, WAYS[how]), x)
    if how == "torch":
        return found, None
    report = gistkit.report(model)
    return found, (len(report.graphs), report.plain_bytes, report.kept_bytes)


def warm_up():
    """What a first compilation imports, once for both processes."""
    with graphs_run_as_they_are(), torch.no_grad():  # torch 2.11 has no autograd in processes that are forked from one
        torch.compile(network().blocks[0])(torch.randn(64, WIDTH))
    torch._dynamo.reset()


def main(rank, folder):
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.use_deterministic_algorithms(True)
    x = torch.randn(2, 64, WIDTH, generator=torch.Generator().manual_seed(rank)).requires_grad_()  # so blocks are equal
    with graphs_run_as_they_are():  # kernels are those that a block has in one process
        results = {(wrap.__name__, how): case(wrap, how, x) for wrap, how in CASES}
    torch.save(results, Path(folder, f"{rank}.pt"))
    distributed.barrier()
    distributed.destroy_process_group()
