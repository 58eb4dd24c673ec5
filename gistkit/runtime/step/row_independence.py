"""Whether the rows of a model's results depend on each other, found out with forwards of a few rows.

Any operator may couple rows, so the model itself is asked: a copy of it (:func:`isolated`) runs without gradients, its
random draws constant. Forwards of rows [a, b], of a and of b alone must give the same for a and for b. a and b are the
first and last row of the batch; where these do not pass, as many rows as the smallest part has, for rows may belong
together in groups. Other numbers of rows take other kernels and orders of summation, so half of the digits are
demanded: ``sqrt(u)`` relatively, u the unit roundoff of the coarsest type in use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.linalg import vector_norm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gistkit.capture import joined, no_autocast_cache, plain_copy, row_bytes, tensors_in, untouched_random_states
from gistkit.capture import rows as slices
from gistkit.runtime.live import LiveBytes

REMEDIES = (
    'pass sub_batches=1, or plan without sub-batches (fidelity="bitwise"), or take the parts for what they give with '
    "verify=False"
)
UNKNOWN = "whether rows depend on each other could not be found out"
Inputs = tuple[tuple, dict]
TF32 = 2.0**-11
"""The unit roundoff of CUDA's products of float32, unless the caller has them in full."""
OFF = {"dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}
"""Arguments of operators that draw random numbers, by which they draw none."""
NOISE = 0.1
"""The size of the values that stand for parameters which are all zero, as the last ones of a block or a head often are
at first: zeros would hide everything before them."""


def check_row_independence(
    model: torch.nn.Module, inputs: Inputs, batch: int, least: int, given_statistics: bool, room_bytes: int | None
) -> None:
    """Raise ValueError where the rows of ``model``'s results depend on each other, or where that cannot be found out.

    ``least``: the rows of the smallest part. ``given_statistics``: batch norms have given statistics instead of the
    batch's. ``room_bytes``: what the forwards may take; None: anything. Synchronises."""

    def forward(*parts: slice) -> Any:
        args, kwargs = joined(inputs, parts)
        copied = isolated(model, given_statistics=given_statistics)
        with untouched_random_states(), torch.no_grad(), no_autocast_cache(), ConstantDraws():
            return copied(*args, **kwargs)

    why, unit = "", roundoff(tensors_in([tensors_of(model), inputs]))
    for rows in dict.fromkeys((1, least)):
        try:
            why = "" if room_bytes is None else _lacks_room(model, inputs, rows, room_bytes)
            why = why or _coupled(forward, slice(0, rows), slice(batch - rows, batch), unit)
        except Exception as error:  # few rows may be too few for the model; the step itself may run
            cause = str(error).strip().split("\n")[0]
            why = f"{UNKNOWN}: {type(error).__name__}: {cause}"
        if not why:
            return
    raise ValueError(f"step: {why}; {REMEDIES}")


def _coupled(forward: Callable[..., Any], a: slice, b: slice, unit: float) -> str:
    both = forward(a, b)
    if not any(True for _ in tensors_in(both)):
        return f"{UNKNOWN}: the model's results, a {type(both).__name__}, hold no tensors in tuples, lists or dicts"
    off = max(_off(forward, both, half, part, unit) for half, part in enumerate((a, b)))
    if not off:
        return ""
    return (
        "the rows of a batch must not depend on each other to be taken in sub-batches, and what the model gives for a "
        f"row changes with the rows beside it, by {off:.1e} of the largest value"
    )


def _off(forward: Callable[..., Any], both: Any, half: int, part: slice, unit: float) -> float:
    """How far results of ``part`` as a half of ``both`` are from those alone, 0 where near."""
    alone = forward(part)
    mine = _half(both, half, alone)
    off = max((0.0, *map(_distance, mine, tensors_in(alone))))
    return off if off > math.sqrt(max(unit, roundoff(mine))) else 0.0


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of two tensors relative to their largest value; infinities are the largest numbers."""
    if torch.equal(a, b):
        return 0.0
    if not _of_dtype(a.dtype):
        return math.inf
    off = float(vector_norm(a - b, math.inf))
    if not math.isfinite(off):
        a, b = a.nan_to_num() / 2, b.nan_to_num() / 2
        off = float(vector_norm(a - b, math.inf))
    return off / max(float(vector_norm(a, math.inf)), float(vector_norm(b, math.inf))) if off else 0.0


def roundoff(items: Iterable[torch.Tensor]) -> float:
    """The unit roundoff of the coarsest floating type among tensors, autocast and CUDA's products."""
    found = [t for t in items if _of_dtype(t.dtype)]
    units = [_of_dtype(t.dtype) for t in found]
    for device in {t.device.type for t in found}:
        if torch.is_autocast_enabled(device):
            units.append(_of_dtype(torch.get_autocast_dtype(device)))
        if device == "cuda":
            units.append(TF32)
    return max(units, default=_of_dtype(torch.float32))


def _of_dtype(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point or dtype.is_complex else 0.0


def _half(item: Any, half: int, like: Any) -> list[torch.Tensor]:
    """The first or second half of every tensor along the dimension in which it is twice as long as that of ``like``."""
    found = []
    for t, alone in zip(tensors_in(item), tensors_in(like), strict=True):
        dims = [d for d, (n, m) in enumerate(zip(t.shape, alone.shape, strict=False)) if n != m]
        if t.dim() != alone.dim() or any(t.shape[d] != 2 * alone.shape[d] for d in dims) or len(dims) > 1:
            raise ValueError(f"the model returns shape {tuple(t.shape)} for twice the rows of {tuple(alone.shape)}")
        found.append(t.narrow(dims[0], half * alone.shape[dims[0]], alone.shape[dims[0]]) if dims else t)
    return found


def _lacks_room(model: torch.nn.Module, inputs: Inputs, rows: int, room_bytes: int) -> str:
    """Why forwards of 2 * rows rows must not run, '' where they take at most ``room_bytes``, by a fake run."""
    mode = FakeTensorMode()
    args, kwargs = tree_map_only(torch.Tensor, lambda t: mode.from_tensor(t.detach()), slices(inputs, 0, 2 * rows))
    fake = isolated(model, mode.from_tensor)
    with untouched_random_states(), no_autocast_cache(), torch.no_grad(), mode, LiveBytes(timeline=False) as live:
        out = fake(*args, **kwargs)
    result_bytes = sum(t.numel() * t.element_size() for t in tensors_in(out))
    copied_bytes = sum(t.untyped_storage().nbytes() for t in tensors_of(model) if _copied(t))
    need_bytes = live.peak_bytes + 2 * result_bytes + 2 * rows * row_bytes(inputs) + copied_bytes
    if need_bytes <= room_bytes:
        return ""
    return f"{UNKNOWN}: it takes {need_bytes} bytes; plan with a budget of {need_bytes - room_bytes} bytes more"


class ConstantDraws(TorchDispatchMode):
    """Random operators give what depends on no generator and no row: dropouts keep everything, other draws are
    constants, so permutations take the first row for all and mixed rows differ from unmixed ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        if any(name in OFF for name in names):
            args = tuple(OFF.get(name, value) for name, value in zip(names, args, strict=False))
            return func(*args, **{name: OFF.get(name, value) for name, value in kwargs.items()})
        drawn = func(*args, **kwargs)
        for t in tensors_in(drawn):
            t.fill_(1 if "bernoulli" in func._schema.name else 0.5 if t.is_floating_point() else 0)
        return drawn


def own_copy(t: torch.Tensor) -> torch.Tensor:
    """A copy that the trial may overwrite: parameters with small noise; what is not copied, itself."""
    if not _copied(t):
        return t
    if isinstance(t, torch.nn.Parameter):
        return torch.nn.Parameter(torch.empty_like(t).uniform_(-NOISE, NOISE), t.requires_grad)
    return t.detach().clone()


def _copied(t: torch.Tensor) -> bool:
    """Whether a copy has its own ``t``: noise for a parameter of zeros, a clone of what may be written to."""
    return t.is_floating_point() and not t.any() if isinstance(t, torch.nn.Parameter) else not t.requires_grad


def isolated(
    model: torch.nn.Module, tensor: Callable[[torch.Tensor], torch.Tensor] = own_copy, given_statistics: bool = False
) -> torch.nn.Module:
    """An uncompressed deep copy with ``tensor(t)`` for each of its tensors. With ``given_statistics`` its batch norms
    normalise by their running statistics, or by 0 and 1."""
    memo: dict[int, Any] = {}
    with untouched_random_states(), torch.no_grad():
        for t in tensors_of(model):
            memo[id(t)] = tensor(t)
        copied = plain_copy(model, memo)
    for module in copied.modules():
        if given_statistics and isinstance(module, _BatchNorm):
            module.eval()
            if module.running_mean is None:
                like = next(copied.parameters())
                module.running_mean = like.new_zeros(module.num_features)
                module.running_var = like.new_ones(module.num_features)
    return copied


def tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """A model's parameters, buffers and plain tensor attributes, each once."""
    tables = (table for m in model.modules() for table in (m._parameters, m._buffers, vars(m)))
    return list({id(t): t for table in tables for t in table.values() if isinstance(t, torch.Tensor)}.values())
