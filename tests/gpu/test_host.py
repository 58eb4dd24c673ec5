"""What goes to the host of a CUDA device and comes back, with the host far ahead: nobody waits, every bit is there."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.runtime.attach import compressed_forward
from tests.gpu.waiting import no_synchronisation

pytestmark = pytest.mark.usefixtures("deterministic_cudnn")

SLEEP_CYCLES = 1_500_000_000  # about 0.8 s at 2 GHz, many times what the host takes for a step


def chain():
    torch.manual_seed(0)
    layers = [m for i in range(6) for m in (nn.Conv2d(3 if i == 0 else 32, 32, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).cuda()
    return model, torch.randn(16, 3, 64, 64, device="cuda"), torch.arange(16, device="cuda") % 10


def steps(model, x, y, asleep):
    """Loss and gradients of the last of three steps, which waits for nothing; ``asleep``: a stream that is late."""
    for number in range(3):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if number == 2:
            with torch.cuda.stream(asleep):
                torch.cuda._sleep(SLEEP_CYCLES)
            with no_synchronisation():
                loss = gistkit.step(model, F.cross_entropy, x, y)
        else:
            loss = gistkit.step(model, F.cross_entropy, x, y)
    return [loss, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("policy", ["vdnn-all", "cdma"])
@pytest.mark.parametrize("asleep", ["compute", "d2h", "h2d"])
def test_a_step_whose_activations_all_go_to_the_host_waits_for_nothing(policy, asleep):
    model, x, y = chain()
    plan = gistkit.plan(model, x, y, loss_fn=F.cross_entropy, policy=policy, density=0.5)
    assert sum(d.place == "host" for d in plan.decisions) >= 6
    expected = steps(copy.deepcopy(model), x, y, torch.cuda.current_stream())
    twin = gistkit.compress(model, plan)
    gistkit.step(twin, F.cross_entropy, x, y)
    (offloader,) = compressed_forward(twin).engine._offloads.values()
    backend = offloader.backend
    stream = torch.cuda.current_stream() if asleep == "compute" else backend.torch_stream(getattr(backend, asleep))
    found = steps(twin, x, y, stream)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert offloader.outgoing_bytes == offloader.arriving_bytes == 0


def test_the_peak_is_within_the_plan_and_below_plain_pytorchs():
    """All that the allocator hands out from before the model on, against the plan's peak, in which everything is."""
    peaks = []
    for policy in ("plain", "vdnn-all"):
        gc.collect()
        before = torch.cuda.memory_allocated()
        model, x, y = chain()
        plan = gistkit.plan(model, x, y, loss_fn=F.cross_entropy, policy=policy)
        gistkit.compress(model, plan)
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            gistkit.step(model, F.cross_entropy, x, y)
        peaks.append((torch.cuda.max_memory_allocated() - before, plan.peak_bytes))
        del model, x, y
    (plain, _), (measured, planned) = peaks
    assert measured <= planned and measured < plain


def test_nothing_is_left_behind():
    model, x, y = chain()
    plan = gistkit.plan(model, x, y, loss_fn=F.cross_entropy, policy="vdnn-all")
    assert any(d.on_host for d in plan.decisions), plan
    twin = gistkit.compress(model, plan)
    gistkit.step(twin, F.cross_entropy, x, y)
    offloaders = list(compressed_forward(twin).engine._offloads.values())
    assert len(offloaders) == 1, gistkit.report(twin)
    (offloader,) = offloaders
    del offloaders
    chunks = [chunk.memory for chunk in offloader.arena.chunks]
    assert chunks and all(memory.is_pinned() for memory in chunks) and offloader.arena.used_bytes == 0
    gistkit.restore(twin)
    del offloader
    gc.collect()
    assert not any(memory.is_pinned() for memory in chunks)


def test_steady_steps_take_no_memory_from_cuda_or_the_host():
    """vDNN section III-B: a pool as large as what a step needs. Warm-up has the latest copies that there can be."""
    model, x, y = chain()
    plan = gistkit.plan(model, x, y, loss_fn=F.cross_entropy, policy="cdma", density=0.5)
    gistkit.compress(model, plan)
    gistkit.step(model, F.cross_entropy, x, y)
    (offloader,) = compressed_forward(model).engine._offloads.values()
    for stream in (offloader.backend.d2h, offloader.backend.h2d):
        steps(model, x, y, offloader.backend.torch_stream(stream))
    taken = torch.cuda.memory_stats()["num_device_alloc"], len(offloader.arena.chunks)
    for _ in range(8):
        model.zero_grad(set_to_none=True)
        gistkit.step(model, F.cross_entropy, x, y)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_stats()["num_device_alloc"], len(offloader.arena.chunks)) == taken
