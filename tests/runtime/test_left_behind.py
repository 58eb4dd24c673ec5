"""Nothing is left behind: by steps, by a host that does not pin, by a run that is killed."""

import gc
import os
import signal
import subprocess
import sys
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.errors import HostMemoryError
from gistkit.runtime.attach import compressed_forward
from gistkit.runtime.offload import host_memory

STEPS = """
import torch, gistkit
from tests.runtime.test_left_behind import under_vdnn
model, step = under_vdnn()
while True:
    loss = step()
    print("step", flush=True)
"""


def under_vdnn():
    """A model under a plan that sends maps to the host, and its step."""
    torch.manual_seed(0)
    layers = [m for i in range(3) for m in (nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16 * 16, 10))
    x, y = torch.randn(4, 3, 16, 16), torch.arange(4)
    plan = gistkit.plan(model, x, y, loss_fn=F.cross_entropy, policy="vdnn-all", hardware="h200")
    assert sum(d.on_host for d in plan.decisions) == 2
    gistkit.compress(model, plan)
    return model, lambda: gistkit.step(model, F.cross_entropy, x, y)


def test_steps_leave_no_memory_thread_or_file():
    under_vdnn()[1]()  # what a process opens once
    gc.collect()
    process = psutil.Process()
    before = process.num_threads(), process.num_fds()
    model, step = under_vdnn()
    for _ in range(2):
        step()
    (offloader,) = compressed_forward(model).engine._offloads.values()
    chunks = [weakref.ref(chunk.memory.untyped_storage()) for chunk in offloader.arena.chunks]
    assert chunks and offloader.arena.used_bytes == 0
    gistkit.restore(model)
    del offloader
    gc.collect()
    assert not any(chunk() for chunk in chunks)
    assert (process.num_threads(), process.num_fds()) == before


def test_a_killed_run_leaves_no_file(tmp_path):
    """The host's pages are the process's own, without a name."""
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", STEPS], stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None and run.stdout.readline() == "step\n"
        children = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGKILL)
    assert run.returncode == -signal.SIGKILL and not any(child.is_running() for child in children)
    assert list(tmp_path.iterdir()) == []
    assert not os.path.isdir("/dev/shm") or set(os.listdir("/dev/shm")) <= shared


@pytest.fixture
def runtime(monkeypatch):
    """CUDA's, which registers nothing: ``codes`` are what it returns, ``mapped`` the memory that it was given."""
    found = SimpleNamespace(code=0, mapped=[], unpinned=0)

    def register(address, nbytes, flags):
        found.mapped.append((address, nbytes))
        return found.code

    def unregister(address):
        found.unpinned += 1

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(host_memory, "_runtime", lambda: cudart)
    monkeypatch.setattr(host_memory, "device_cores", lambda device: set())
    monkeypatch.setattr(host_memory, "_CHECKED", set())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return found


def test_a_host_that_does_not_pin_is_an_error_and_its_pages_go(runtime):
    runtime.code = 2
    before = psutil.Process().memory_info().rss
    with pytest.raises(HostMemoryError, match=r"268435456 bytes .* does not pin it: 2; raise the limit .*ulimit -l"):
        host_memory.pin(2**28, torch.device("cpu"))
    gc.collect()
    assert len(runtime.mapped) == 1 and psutil.Process().memory_info().rss - before < 2**26


def test_memory_that_does_not_give_back_what_is_written_is_unpinned(runtime, monkeypatch):
    monkeypatch.setattr(host_memory, "_written_and_read", lambda memory, device: False)
    with pytest.raises(HostMemoryError, match=r"4096 bytes .* what cpu writes there does not come back"):
        host_memory.pin(4096, torch.device("cpu"))
    assert runtime.unpinned == 1 and not host_memory._CHECKED
