"""A small run for compute-sanitizer: parcels to the host and back, compressed steps, steps whose maps go to the host.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --target-processes all --error-exitcode 3 \\
        python3 -m bench.sanitized

Without PyTorch's cache every tensor is an allocation of its own, so that a byte beyond it is noticed. Other tools:
``--tool racecheck``, ``synccheck``, ``initcheck``. ``--device cpu`` tries it out. Exit status 1 where a bit of a
parcel, a loss or a gradient differs.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.codecs import codec
from gistkit.runtime.offload.backends import backend_for
from gistkit.runtime.offload.offloader import Offloader

MIB = 2**20
CODECS = ("dense", "mask1", "zvc", "csr", "zvc+fp8", "csr+fp16", "fp8", "fp10s")
POLICIES = ("vdnn-all", "cdma")
ELEMENTS = 40_001
"""Not a multiple of any block."""


def parcels(device: torch.device) -> list[str]:
    """Every encoding, pending where it can be, in stack order; the names of those that came back as others."""
    offloader = Offloader(backend_for(device), MIB, MIB // 4, MIB, MIB)
    wrong, sent = [], []
    for number, name in enumerate(CODECS):
        x = torch.relu(torch.randn(ELEMENTS + number, device=device) - number / 8)
        form = codec(name)
        begin = getattr(form, "begin", form.encode)
        sent.append((name, offloader.put(begin(x)), form.decode(form.encode(x))))
    while sent:
        name, parcel, expected = sent.pop()
        if sent:
            sent[-1][1].prefetch()
        found = codec(name).decode(parcel.get())
        wrong += [] if torch.equal(found, expected) else [f"parcel {name}"]
        del parcel
    offloader.close()
    return wrong


def network() -> nn.Module:
    """Masks, a pool's map, a sparse map, a rebuild through batch norm."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 16, 3), nn.ReLU()),
        *(nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(16 * 14 * 14, 10)),
    )


def steps(device: torch.device) -> list[str]:
    """Two compressed steps a plan beside plain PyTorch's; the names of plans with another loss or gradient."""
    torch.manual_seed(0)
    model = network().to(device).train()
    x, y = torch.randn(6, 3, 64, 64, device=device), torch.arange(6, device=device)

    def bits(of: nn.Module) -> list[torch.Tensor]:
        of.zero_grad(set_to_none=True)
        loss = gistkit.step(of, F.cross_entropy, x, y)
        return [loss.detach(), *(p.grad.clone() for p in of.parameters() if p.grad is not None)]

    def plan(policy: str) -> gistkit.Plan:
        words = {"hardware": "h100-sxm", "measure": False, "density": 0.5}
        return gistkit.plan(model, x, y, loss_fn=F.cross_entropy, policy=policy, **words)

    expected, wrong = [bits(copy.deepcopy(model)) for _ in range(2)][-1], []
    for name in ("gist", "fp8s", *POLICIES):
        twin = copy.deepcopy(model)
        if name in POLICIES:
            gistkit.compress(twin, plan(name))
        else:
            gistkit.compress(twin, lossy=None if name == "gist" else name, min_gain=0.0)
        found = [bits(twin) for _ in range(2)][-1]
        same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        wrong += [] if same or name == "fp8s" else [f"step {name}"]
    return wrong


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.sanitized")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    device, begun = torch.device(parser.parse_args(argv).device), time.monotonic()
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    wrong = parcels(device) + steps(device)
    print(f"bench.sanitized: {time.monotonic() - begun:.0f} s; other bits: {', '.join(wrong) or 'none'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
