"""What goes to the host of a CUDA device and comes back, with the host far ahead: nobody waits, every bit is there."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.runtime.offload.host import Parcel, arrived
from tests.gpu.waiting import no_synchronisation

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic_cudnn")]

SLEEP_CYCLES = 1_500_000_000  # about 0.8 s at 2 GHz, many times what the host takes for a step


def test_memory_that_is_used_again_at_once_has_gone_out_before():
    torch.cuda.empty_cache()
    x = torch.randn(2**22, device="cuda")
    want, address = x.clone(), x.data_ptr()
    torch.cuda._sleep(SLEEP_CYCLES)
    with no_synchronisation():
        parcel = Parcel((x,))
        del x
        taken = torch.empty(2**22, device="cuda").fill_(7.0)
        (found,) = parcel.tensors()
    assert taken.data_ptr() == address and not parcel._there
    assert torch.equal(found, want)


def test_pinned_memory_that_is_let_go_of_is_not_written_before_it_was_read():
    wanted, found = [], []
    torch.cuda._sleep(SLEEP_CYCLES)
    with no_synchronisation():
        for i in range(8):
            x = torch.full((2**20,), float(i), device="cuda")
            wanted.append(x.clone())
            found.append(Parcel((x,)).tensors()[0])  # the host's memory is free for the next
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_what_comes_back_on_another_stream_waits_for_the_way_out():
    x = torch.randn(2**22, device="cuda")
    torch.cuda._sleep(SLEEP_CYCLES)
    parcel, other = Parcel((x,)), torch.cuda.Stream()
    with torch.cuda.stream(other):
        (found,) = parcel.tensors()
    torch.cuda.synchronize()
    assert torch.equal(found, x)


def test_the_host_reads_what_has_arrived():
    x = torch.zeros(2**22, device="cuda")
    torch.cuda._sleep(SLEEP_CYCLES)
    x.fill_(3.0)
    assert bool((arrived(x) == 3.0).all()) and bool((arrived(x.view(2048, -1)[:, ::3]) == 3.0).all())


def test_a_step_whose_activations_all_go_to_the_host_waits_for_nothing():
    torch.manual_seed(0)
    layers = [m for i in range(6) for m in (nn.Conv2d(3 if i == 0 else 32, 32, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).cuda()
    x, y = torch.randn(16, 3, 64, 64, device="cuda"), torch.arange(16, device="cuda") % 10
    plan = gistkit.plan(model, x, y, loss_fn=F.cross_entropy, policy="vdnn-all")
    assert sum(d.place == "host" for d in plan.decisions) >= 6
    found = []
    for tried in (model, gistkit.compress(copy.deepcopy(model), plan)):
        for number in range(3):
            tried.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            if number == 2:
                torch.cuda._sleep(SLEEP_CYCLES)
                with no_synchronisation():
                    loss = gistkit.step(tried, F.cross_entropy, x, y)
            else:
                loss = gistkit.step(tried, F.cross_entropy, x, y)
        found.append([loss, *(p.grad for p in tried.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
