"""The peak of a compiled step as gistkit predicts it, beside that of the code which Inductor writes for an H200.

    python -m bench.compiled_peaks [--models densenet121,vgg16] [--classes bitwise,fp8s+75%] [--batch 128]

No GPU is needed: networks, or blocks of :mod:`bench.compiled_traffic`, bf16 under autocast and with a loss, are
lowered on fake tensors (torch 2.13, :mod:`tests.support.gpu_code`). The functions that Inductor writes are run on meta
tensors, with kernels that do nothing: they allocate, reuse and free as on the card, and libraries' results are counted.
Not seen are the workspace of libraries and the gaps of the allocator; the attention is a CPU's.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.compiled_bytes import norms_in_fp32
from bench.compiled_traffic import BLOCKS, Encoder, Patches
from bench.networks import GPT, densenet121
from gistkit import zoo
from gistkit.benchmark.measure import MIB
from gistkit.compiled import Settings, record
from gistkit.compiled.custom import Partitioner
from gistkit.compiled.forms import narrow
from gistkit.compiled.rebuilds import rounding
from gistkit.planning.forms.options import FIDELITIES

WHOLE: dict[str, Callable[[], nn.Module]] = {
    "densenet121": densenet121, "vgg16": zoo.vgg16, "resnet50": zoo.resnet50, "gpt2": GPT,
    "vit_s": lambda: nn.Sequential(nn.Conv2d(3, 384, 16, 16), Patches(), *(Encoder() for _ in range(12))),
}  # fmt: skip


class Live(TorchDispatchMode):
    """Bytes of all storages of meta tensors that are made inside: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.peak, self.known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(made) if isinstance(x, torch.Tensor)):
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
        return made

    def _free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.bytes -= size


def runnable(code: str) -> tuple[Callable[[list[Any]], tuple], dict[str, Any]]:
    """A graph's code on meta tensors: its function, and its arguments by name."""
    call = textwrap.dedent(code[code.index("    def call(self, args):") : code.index("\nrunner = ")])
    call = re.sub(r"torch\.cuda\._DeviceGuard\(\d\)", "nullcontext()", re.sub(r"torch\.cuda\.set_device.*", "", call))
    given = code[code.index("def get_args():") : code.index("\n\n\ndef benchmark_compiled_module")]
    given = re.sub(r"from torch._dynamo.*", "", given).replace("rand_strided(", "empty_strided_cuda(")

    def empty(size: Any, stride: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")

    kernel = SimpleNamespace(run=lambda *_, **__: None)
    words: dict[str, Any] = dict.fromkeys(re.findall(r"^(\w+) = async_compile\.", code, re.M), kernel)
    words |= dict.fromkeys(("assert_size_stride", "assert_alignment", "get_raw_stream"), lambda *_: None)
    words |= {"torch": torch, "aten": torch.ops.aten, "extern_kernels": torch.ops.aten, "nullcontext": nullcontext}
    words |= {"empty_strided_cuda": empty, "reinterpret_tensor": torch._C._dynamo.guards._reinterpret_tensor}  # type: ignore
    exec(f"{call}\n{given}", words)
    names = re.findall(r"\w+", re.findall(r"^ +(.*) = args$", call, re.M)[0])
    return lambda args: words["call"](None, args), dict(zip(names, words["get_args"](), strict=True))


def simulated(forward: str, backward: str) -> tuple[int, int]:
    """Bytes at the peaks of forward and backward; forward's inputs and the caller's results stay."""
    with Live() as live:
        call, inputs = runnable(forward)
        made = list(call(list(inputs.values())))
        first = live.peak
        call, given = runnable(backward)
        tangents = [given[name] for name in given if name.startswith("tangents")]
        kept = len(given) - len(tangents)
        given = made[len(made) - kept :] + tangents
        del made[len(made) - kept :], tangents
        live.peak = live.bytes
        call(given)
    return first, live.peak


def peaks(make: Callable[[], tuple[nn.Module, torch.Tensor]], settings: Settings) -> tuple[int, int, int]:
    """Bytes at the peak of a step of a model and its batch: predicted, forward's and backward's."""
    from tests.support import gpu_code

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().logsumexp(-1).mean()

    with pytest.MonkeyPatch.context() as patch, record.collected() as records, norms_in_fp32():
        gpu_code.pretend_gpu(patch)
        patch.setattr(rounding, "rounds_within_kernels", lambda pair: True)
        patch.setattr(narrow, "converts_to_float8", lambda device: True)
        code = gpu_code.sources(make, loss, Partitioner(settings))
    return records[-1].peak_bytes, *simulated(*code)


def step(name: str, rows: int) -> tuple[nn.Module, torch.Tensor]:
    """A network without dropout, and its batch."""
    model = (WHOLE | BLOCKS)[name]().train().apply(lambda module: setattr(module, "p", 0.0))
    if name == "gpt2":
        return model, torch.zeros(rows // 8, 512, dtype=torch.long)
    return model, torch.zeros(rows, 3, 224, 224).to(memory_format=torch.channels_last)


def main(argv: list[str] | None = None) -> int:
    """Prints the peaks of each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(WHOLE))
    parser.add_argument("--classes", default="bitwise,reassociated,fp8s")
    parser.add_argument("--batch", type=int, default=128)
    words = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    for model in words.models.split(","):
        for name in words.classes.split(","):
            given: dict[str, Any] = {
                "fidelity" if w in FIDELITIES else "budget" if w.endswith("%") else "lossy": w for w in name.split("+")
            }
            told, *found = peaks(lambda: step(model, words.batch), Settings(**given))  # noqa: B023
            forward, backward = (size / MIB for size in found)
            print(f"{model} {name}: predicted {told / MIB:,.0f} MiB, simulated {max(found) / MIB:,.0f} (forward "
                  f"{forward:,.0f}, backward {backward:,.0f}): {max(found) / told - 1:+.1%}", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
