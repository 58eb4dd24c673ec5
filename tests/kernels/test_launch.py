"""The compiled kernel of a launch's first call is called directly by later ones, and only by those of its kind."""

from contextlib import nullcontext

import pytest
import torch

from gistkit.kernels import compat
from gistkit.kernels.launch import tiling
from gistkit.kernels.launch.tiling import Ready

X, Y = torch.empty(64), torch.empty(64)
N = 3 * 16


class Compiled:
    function, packed_metadata = "handle", "metadata"

    def __init__(self):
        self.calls = []

    def run(self, *args):
        self.calls.append(args)


class Kernel:
    """Stands for a Triton kernel of two addresses, a number and two constants."""

    arg_names = ("x_ptr", "y_ptr", "n", "ROWS", "ALIGNED")

    def __init__(self):
        self.compiled = []

    def __getitem__(self, grid):
        def first(*args, **options):
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return first


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setattr(compat, "current_stream", lambda device: 7)
    kernel = Kernel()

    def launch(x=X, y=X, n=N, device=0, num_warps=4, **constants):
        tiling.launch_here(kernel, 5, device, num_warps, (x, y, n), {"ALIGNED": True, "ROWS": 256, **constants})
        return kernel.compiled

    launch()
    return launch


def test_a_second_launch_calls_the_compiled_kernel(launched):
    (compiled,) = launched()
    address = X.data_ptr()
    assert compiled.calls == [(5, 1, 1, 7, "handle", "metadata", None, None, None, address, address, N, 256, True)]


@pytest.mark.parametrize(
    "change",
    [{"n": 1}, {"n": 17}, {"n": 2**31}, {"n": 2**63}, {"n": 16.0}, {"x": X.half()}, {"y": X[1:]}, {"y": None},
     {"device": 1}, {"num_warps": 1}, {"ROWS": 512}, {"ALIGNED": False}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_what_triton_specialises_on_makes_another_kind(launched, change):
    compiled = launched(**change)
    assert len(compiled) == 2 and not compiled[0].calls
    launched(**change)
    assert len(compiled) == 2 and len(compiled[1].calls) == 1


@pytest.fixture
def kernel(monkeypatch):
    """A kernel on device 0, which is the current one."""
    monkeypatch.setattr(compat, "current_stream", lambda device: 7)
    monkeypatch.setattr(compat, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    return Kernel()


def ready(kernel, device=0):
    return Ready(kernel, device, ROWS=256, ALIGNED=True)


def is_ready(launch, *tensors):
    """Whether it launches at the tensors' addresses."""
    return launch.at(5, tuple(t.data_ptr() for t in tensors), (48,))


def test_it_makes_the_same_call(kernel):
    launch = ready(kernel)
    assert not is_ready(launch, X, Y) and not kernel.compiled, "nothing is known before the first"
    launch(5, (48,), X, Y)
    (compiled,) = kernel.compiled
    assert not compiled.calls
    launch(5, (48,), X, Y)
    tiling.launch_here(kernel, 5, 0, 4, (X, Y, 48), {"ROWS": 256, "ALIGNED": True})
    assert len(kernel.compiled) == 1 and compiled.calls[0] == compiled.calls[1]


def test_addresses_of_another_kind_go_the_usual_way(kernel):
    launch = ready(kernel)
    launch.first(5, (X[1:], Y), (48,))
    assert not is_ready(launch, X, Y), "what was compiled for odd addresses serves no others"
    launch.first(5, (X, Y), (48,))
    assert len(kernel.compiled) == 2 and is_ready(launch, X[4:], Y)
    assert not is_ready(launch, X[1:], Y) and not is_ready(launch, X, Y[2:])


def test_another_device_is_made_the_current_one(kernel, monkeypatch):
    launch = ready(kernel, device=1)
    launch.first(5, (X, Y), (48,))
    assert not is_ready(launch, X, Y)
    monkeypatch.setattr(compat, "current_device", lambda: 1)
    assert is_ready(launch, X, Y)
