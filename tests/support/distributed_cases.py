"""One of two processes that train networks plain and compressed under DistributedDataParallel and fully_shard."""

import contextlib
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gistkit
from tests.support.training import batches

DDP = {
    "default": ({}, ("before", "planned", "inside", "around")),
    "unused parameters": ({"find_unused_parameters": True}, ("before",)),
    "static graph": ({"static_graph": True}, ("inside",)),
    "bucket view": ({"gradient_as_bucket_view": True}, ("around",)),
    "no_sync": ({}, ("inside",)),
    "autocast": ({}, ("before",)),
}
"""DistributedDataParallel's arguments by case, and where the model is compressed."""


class Net(nn.Module):
    def __init__(self, reads_all=True):
        super().__init__()
        first = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        self.body = nn.Sequential(*first, nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(144, 10)
        self.spare = nn.Linear(144, 10)
        self.reads_all = reads_all

    def forward(self, x):
        x = self.body(x).flatten(1)
        return self.head(x) + self.spare(x) if self.reads_all else self.head(x)


def whole(t):
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def precision(case):
    return torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast")


def train(model, rank, case):
    """Losses, the last gradients, parameters and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step, (x, y) in enumerate(batches(3, 4, 16, seed=rank)):
        waits = case == "no_sync" and step % 2 == 0
        with model.no_sync() if waits else contextlib.nullcontext():
            with precision(case):
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
        found.append(loss.detach().clone())
        gradients = [whole(p.grad) for p in model.parameters() if p.grad is not None]
        if not waits:
            optimizer.step()
            optimizer.zero_grad()
    return found + gradients + [whole(t) for t in (*model.parameters(), *model.buffers())]


def budget(model, case, rank):
    (batch,) = batches(1, 4, 16, seed=rank)
    with precision(case):
        return gistkit.plan(model, *batch, loss_fn=nn.functional.cross_entropy, budget="90%")


def ddp(case, how, rank):
    torch.manual_seed(0)
    model = Net(reads_all=case != "unused parameters")
    if how in ("before", "planned"):
        gistkit.compress(model, budget(model, case, rank) if how == "planned" else None)
    parallel = DistributedDataParallel(model, **DDP[case][0])
    if how in ("inside", "around"):
        gistkit.compress(parallel.module if how == "inside" else parallel)
    found = train(parallel, rank, case)
    return found, None if how == "plain" else gistkit.report(parallel if how == "around" else model)


def fsdp(case, how, rank):
    torch.manual_seed(0)
    model, mesh = Net(), init_device_mesh("cpu", (2,))
    if how == "before":
        gistkit.compress(model)
    for part in (*model.body, model.head, model.spare):
        if next(part.parameters(), None) is not None:
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if how == "inside":
        gistkit.compress(model)
    found = train(model, rank, case)
    return found, None if how == "plain" else gistkit.report(model)


def main(rank, folder):
    patience = timedelta(seconds=100)
    distributed.init_process_group("gloo", f"file://{folder}/store", patience, rank=rank, world_size=2)
    torch.use_deterministic_algorithms(True)
    results = {}
    for case, (_, ways) in DDP.items():
        results["ddp", case] = {how: ddp(case, how, rank) for how in ("plain", *ways)}
    for case, ways in (("default", ("before", "inside")), ("autocast", ("inside",))):
        results["fsdp", case] = {how: fsdp(case, how, rank) for how in ("plain", *ways)}
    told = {
        case: {how: (found, report and (report.ratio, report.notes)) for how, (found, report) in ways.items()}
        for case, ways in results.items()
    }
    torch.save(told, Path(folder, f"{rank}.pt"))
    distributed.barrier()
    distributed.destroy_process_group()
