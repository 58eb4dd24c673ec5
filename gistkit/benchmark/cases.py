"""The layer benchmark's cases: what a case is, and those of every codec of CODECS (operators and rivals: ``bench``).

A case makes a workload from a setting: what to run, what it must give, and the bytes that it has to move (each input
read once, each output written once; for sparse storage the stored elements only). ``run`` and ``expected`` are compared
bit for bit on a small sample, with the values that usually go wrong planted in it, before anything is timed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import torch

from gistkit.codecs import CODECS, Codec, Encoded, Sparse

SPECIALS = (float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, -1e-40, 65520.0, 448.0, 464.0, 2.0**-7, 3e38)


@dataclass(frozen=True)
class Setting:
    """Where and on what a case runs; ``sample``: the small form that is checked; ``density``: that of ReLU outputs."""

    device: str
    dtype: torch.dtype
    nbytes: int
    density: float
    seed: int = 0
    sample: bool = False

    @property
    def numel(self) -> int:
        return self.nbytes // self.dtype.itemsize

    def other(self, dtype: torch.dtype | None = None) -> Setting:
        """The same number of elements, drawn from another seed, of ``dtype`` (default: the setting's)."""
        dtype = dtype or self.dtype
        return replace(self, dtype=dtype, nbytes=self.numel * dtype.itemsize, seed=self.seed + 1)


@dataclass(frozen=True)
class Workload:
    """``run()`` is timed; on a sample its tensors equal those of ``expected()`` in every bit. ``kept_ratio``: bytes of
    what is kept until backward over those of the dense tensor; None where nothing is."""

    run: Callable[[], Any]
    expected: Callable[[], Any]
    moved_bytes: int
    shape: tuple[int, ...]
    kept_ratio: float | None = None


@dataclass(frozen=True)
class Case:
    """``family``: ``codec``, ``operator`` or ``rival``. ``dtypes`` None: the floats that the run asks for.
    ``by_density``: time and bytes depend on the zeros. ``lossless``: every bit comes back; else ``relative_error`` is
    the share of itself by which a value in the normal range may move (of its block's span with integers), None where
    nothing is kept."""

    name: str
    direction: str
    family: str
    make: Callable[[Setting], Workload]
    dtypes: tuple[torch.dtype, ...] | None = None
    densities: tuple[float, ...] = (0.5,)
    cuda_only: bool = False
    by_density: bool = False
    lossless: bool = True
    relative_error: float | None = None


def normal(s: Setting) -> torch.Tensor:
    """Flat normal values; samples carry SPECIALS and come from the CPU's generator, the same ones on every device."""
    where = "cpu" if s.sample else s.device
    x = torch.randn(s.numel, generator=torch.Generator(where).manual_seed(s.seed), device=where).to(s.dtype)
    if s.sample:
        x[7 : 7 + 13 * len(SPECIALS) : 13] = torch.tensor(SPECIALS).to(s.dtype)
    return x.to(s.device)


def activation(s: Setting) -> torch.Tensor:
    """A ReLU output of which about ``density`` is not zero."""
    return torch.relu(normal(s) + NormalDist().inv_cdf(s.density))


def codec_cases() -> list[Case]:
    """Encode and decode of every codec but `dense`; masked gradients where a codec has them; packing of sparse ones, in
    a step of its own and with the encoding, where their number is forecast."""
    cases = []
    for name, codec in CODECS.items():
        if name == "dense":
            continue
        sparse, floats = isinstance(codec, Sparse), codec.dtypes is None or torch.float32 in codec.dtypes
        densities = (0.5, 0.1) if name in ("zvc", "csr") else (0.5,)
        dtypes = None if floats else codec.dtypes
        within = ["encode_within"] if isinstance(codec, Sparse) and codec.packs_within else []
        for direction in ("encode", *["pack"] * sparse, *within, "decode", *["relu_backward"] * _masks(codec)):
            make = _codec_workload(codec, direction)
            loss = codec.relative_error
            cases.append(Case(name, direction, "codec", make, dtypes, densities, False, sparse, codec.lossless, loss))
    return cases


def _masks(codec: Codec) -> bool:
    return type(codec).relu_backward is not Codec.relu_backward and (codec.dtypes is None or len(codec.dtypes) > 1)


def _codec_input(codec: Codec, s: Setting) -> torch.Tensor:
    if codec.dtypes == (torch.bool,):
        return normal(s.other(torch.float32)) > 0
    if codec.dtypes == (torch.uint8,):
        positions = torch.arange(s.nbytes, device=s.device) * 2654435761 >> 7
        return (positions % 16).to(torch.uint8)
    return activation(s) if isinstance(codec, Sparse) or codec.name == "mask1" else normal(s)


def exact(codec: Codec, x: torch.Tensor) -> Encoded:
    """The encoding in its final form; waits for the device where a sparse count is needed."""
    encoded = codec.encode(x)
    if isinstance(codec, Sparse) and encoded.pending:
        codec.settle(encoded, int(codec.total(encoded)))
    return encoded


def _codec_workload(codec: Codec, direction: str) -> Callable[[Setting], Workload]:
    def make(s: Setting) -> Workload:
        x = _codec_input(codec, s)
        grad = normal(s.other()) if _masks(codec) else x
        encoded = exact(codec, x)
        run, moved = _runs(direction, codec, x, grad, encoded)

        def checked() -> Any:
            out = run()
            return codec.decode(out) if isinstance(out, Encoded) else out

        def expected() -> Any:
            theirs = exact(codec, x.cpu())
            if direction == "relu_backward":
                return torch.ops.aten.threshold_backward(grad.cpu(), x.cpu(), 0)
            return x if codec.lossless else codec.decode(theirs)

        ratio = encoded.nbytes / x.nbytes
        return Workload(checked if s.sample else run, expected, moved, tuple(x.shape), ratio)

    return make


def _runs(direction: str, codec: Codec, x: torch.Tensor, grad: torch.Tensor, encoded: Encoded) -> tuple[Callable, int]:
    both = x.nbytes + encoded.nbytes
    if direction == "decode":
        return lambda: codec.decode(encoded), both
    if direction == "relu_backward":
        return lambda: codec.relu_backward(encoded, grad), grad.nbytes + both
    if not isinstance(codec, Sparse):
        return lambda: codec.encode(x), both
    if direction == "encode_within":
        return _encode_within(codec, x, encoded), both
    pending = codec.begin(x)
    index, counts, scratch, _ = pending.payload
    stored = int(codec.total(pending))
    by_element, stored_bytes = encoded.payload[0].numel() == stored, counts.nbytes + stored * scratch.itemsize
    if direction == "encode":
        return lambda: codec.begin(x), x.nbytes + (stored if by_element else index.nbytes) + stored_bytes

    def pack() -> Encoded:
        fresh = copy.copy(pending)
        codec.settle(fresh, stored)
        return fresh

    return pack, stored_bytes + 2 * stored * by_element + sum(t.nbytes for t in encoded.payload[2:])


def _encode_within(codec: Sparse, x: torch.Tensor, encoded: Encoded) -> Callable[[], Encoded]:
    """Room for 1.04 times the elements that will be stored, as training has it by a forecast."""
    assert encoded.nonzeros is not None
    n = x.numel()
    capacity = codec.capacity(n, min(1.0, 1.04 * encoded.nonzeros / n))
    spill = torch.empty(codec.spill_bytes(n, x.dtype, capacity), dtype=torch.uint8, pin_memory=x.is_cuda)
    count = torch.empty((1, 2), dtype=torch.int64, pin_memory=x.is_cuda)[0, 0]
    return lambda: codec.begin_within(x, capacity, spill, count)
