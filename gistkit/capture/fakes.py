"""Fakes: FakeTensorMode with the dtypes and lives of real tensors, and a memory of what operators return.

PyTorch's own memory takes about 0.15 ms for an operator, most of it for its key; ours takes a tenth. It holds, by
operator, geometry of the operands and other arguments, the geometry of the results and which operand's storage they are
on, as it was seen the first time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_NORMS = {
    _aten.native_batch_norm.default: slice(1, 5),
    _aten._native_batch_norm_legit.default: slice(1, 5),
    _aten.native_layer_norm.default: slice(2, 4),
    _aten.native_group_norm.default: slice(1, 3),
}
"""Norms with where they have weight, bias and running statistics among their arguments, as far as these are tensors."""
_BATCH_NORMS = (_aten.native_batch_norm.default, _aten._native_batch_norm_legit.default)
_BACKWARD_OF = (_aten.native_batch_norm_backward.default, _aten.native_layer_norm_backward.default)
"""Their gradients lie in memory by rows or, a batch norm's, as its input; fake ones as the gradients that come in."""
DEVICE = torch.ops.prim.device.default
_NARROW = (torch.bfloat16, torch.float16)
_HASHED = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
_KNOWN = 1 << 14


class _Made(NamedTuple):
    """A result: on the storage of operand ``of`` (None: on one of its own); ``state``: its attributes."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    of: int | None
    offset: Any
    state: dict[str, Any]


class Fakes(FakeTensorMode):
    """FakeTensorMode whose tensors have the dtypes of real ones and exist only where real ones do. A norm of narrow
    maps with fp32 weights or running statistics saves fp32 statistics, as it does on a CPU, and a group norm's gradient
    is as narrow as its input. Where the CPU's operators will run (``on_cpu``) no gradient is made of a batch norm's
    input that needs none; cuDNN makes it anyway."""

    _known: ClassVar[dict[tuple | None, tuple[type, list]]] = {}  # by all captures, as PyTorch's own

    def __init__(self, on_cpu: bool) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.on_cpu = on_cpu
        self.cache_enabled = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # TorchScript's calls leave function modes on: they would see this
            if func is _aten.rand.default and _is_one_number(args[0], kwargs.get("device")):
                return self._drawn(args[0], kwargs)
            known = self.recalled(func, args, kwargs)
            if known is not NotImplemented:
                return known
            key = self._key(func, args, kwargs)  # before the operator changes an operand
            out: Any = self._batch_norm(*args[:6]) if func in _BATCH_NORMS else None
            if func is _aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
                out = self._grouped(func, types, args, kwargs)
            out = self._as_real(func, args, self.dispatch(func, types, args, kwargs) if out is None else out)
            if key is not None and (made := _what(func, args, kwargs, out)) is not None:
                if len(self._known) >= _KNOWN:
                    self._known.clear()
                self._known[key] = made
            return out

    def recalled(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """What an operator returns, where that is known, for modes above to ask; else NotImplemented."""
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        with no_dispatch():
            known = self._known.get(self._key(func, args, kwargs))
            return NotImplemented if known is None else self._again(*known, args)

    def _drawn(self, size: Any, words: dict) -> FakeTensor:
        """A uniform number, which models compare with a probability before they leave a layer out: 0.5, so that the
        likelier way is taken. Those of transformers do so in each layer, with the probability 0 by default."""
        with no_dispatch():
            half = torch.full(size, 0.5, **{**words, "device": "cpu"})
        return self.fake_tensor_converter.from_real_tensor(self, half, make_constant=True)

    def _key(self, func: Any, args: tuple, kwargs: dict) -> tuple | None:
        """All on which depends what an operator returns; None where that cannot be told."""
        found = [func, self.on_cpu, torch.get_default_dtype(), torch._C._get_default_device()]
        found.append(torch.is_inference_mode_enabled())
        if kwargs:
            found.extend(kwargs)
            args = (*args, *kwargs.values())
        return tuple(found) if self._describe(args, found) else None

    def _describe(self, values: Iterable[Any], found: list) -> bool:
        for v in values:
            kind = type(v)
            found.append(kind)
            if kind is FakeTensor:
                if v.constant is not None or v.fake_mode is not self or v.layout is not torch.strided:
                    return False
                found += v.dtype, v.size(), v.stride(), v.storage_offset(), v.fake_device
                found += v.untyped_storage().nbytes(), v.requires_grad, v.is_conj(), v.is_neg(), v.is_inference()
            elif kind in _HASHED:
                found.append(v)
            elif kind is list or kind is tuple:
                found.append(len(v))
                if not self._describe(v, found):
                    return False
            else:
                return False
        return True

    def _again(self, kind: type, made: list, args: tuple) -> Any:
        out = [self._new(item, args) if type(item) is _Made else args[item[0]] if item else None for item in made]
        return out[0] if kind is FakeTensor else kind(out)

    def _new(self, made: _Made, args: tuple) -> FakeTensor:
        size, stride, dtype, device, of, offset, state = made
        if of is None:
            like = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        else:
            like = torch.empty(0, dtype=dtype, device="meta").set_(args[of].untyped_storage(), offset, size, stride)
        where: Any = {"dispatch_device": True, "device_for_backend_keys": device}
        t = torch.Tensor._make_subclass(FakeTensor, like, False, **where)
        torch._C._set_throw_on_mutable_data_ptr(t)
        vars(t).update(state)
        t.fake_mode = self
        return t

    def _batch_norm(self, x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool) -> tuple | None:
        """What a batch norm of fp32 maps returns, of which PyTorch's decomposition takes 10 ms; None for others."""
        wide = all(v is None or v.dtype is torch.float32 for v in (x, weight, bias, mean, var))
        if not (training and wide and type(x) is FakeTensor and x.is_contiguous() and x.numel() > x.shape[1] > 0):
            return None
        if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
            return None
        with self:
            return tuple(torch.empty(n, dtype=x.dtype, device=x.device) for n in (x.size(), x.shape[1:2], x.shape[1:2]))

    def _grouped(self, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        """A product by groups of other dtypes, of which PyTorch's fake operator knows bf16's alone."""
        dtype = args[0].dtype
        with self:
            narrow = tuple(v.to(torch.bfloat16) if type(v) is FakeTensor and v.dtype is dtype else v for v in args)
        like: Any = self.dispatch(func, types, narrow, kwargs)
        return self._as(kwargs.get("out_dtype") or dtype, like)

    def _as_real(self, func: Any, args: tuple, out: Any) -> Any:
        """The result with the dtypes and the tensors of a real one."""
        if func in _BACKWARD_OF and out[0] is not None:
            batch = func is _aten.native_batch_norm_backward.default
            how = suggest_memory_format(args[1]) if batch else torch.contiguous_format
            if not out[0].is_contiguous(memory_format=how):
                with self:
                    out = torch.empty_like(out[0], memory_format=how), *out[1:]
        if func is _aten.native_batch_norm_backward.default and self.on_cpu:
            return tuple(t if asked else None for t, asked in zip(out, args[-1], strict=True))
        if func is _aten.native_group_norm_backward.default and out[0] is not None and out[0].dtype != args[1].dtype:
            return self._as(args[1].dtype, out[0]), *out[1:]
        if func not in _NORMS or args[0].dtype not in _NARROW:
            return out
        given = (v.dtype for v in args[_NORMS[func]] if isinstance(v, torch.Tensor))
        return (out[0], *(self._as(torch.float32, v) for v in out[1:])) if torch.float32 in given else out

    def _as(self, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        with self:
            return torch.empty_like(like, dtype=dtype)


def _is_one_number(size: Any, device: Any) -> bool:
    return list(size) in ([], [1]) and torch.device(device or torch._C._get_default_device()).type == "cpu"


def _what(func: Any, args: tuple, kwargs: dict, out: Any) -> tuple[type, list] | None:
    """What an operator has returned, for :meth:`Fakes._again`; None for what cannot be made again: values, a storage
    that two results share or that is larger than they, results on the storage of an operand in a list."""
    if getattr(func, "namespace", "") != "aten" or torch.Tag.inplace_view in func.tags:
        return None
    kind = type(out) if isinstance(out, (FakeTensor, list)) else tuple
    parts = out if isinstance(out, (tuple, list)) else [out]
    if kind is tuple and not isinstance(out, tuple):
        return None
    given = (v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor))
    storages = {t.untyped_storage()._cdata: None for t in given}
    own = {id(v): i for i, v in enumerate(args)}
    top = {v.untyped_storage()._cdata: i for i, v in reversed(list(enumerate(args))) if isinstance(v, FakeTensor)}
    made: list = []
    for t in parts:
        if t is None:
            made.append(())
        elif id(t) in own:
            made.append((own[id(t)],))
        elif type(t) is not FakeTensor or t.constant is not None or t.layout is not torch.strided or t.requires_grad:
            return None
        else:
            storage = t.untyped_storage()
            of = top.get(storage._cdata)
            if of is None:
                if storage._cdata in storages or not fills_storage(t):
                    return None
                storages[storage._cdata] = None
            if t.is_conj() or t.is_neg():
                return None
            state = {k: v for k, v in vars(t).items() if k != "fake_mode"}
            made.append(_Made(t.size(), t.stride(), t.dtype, t.fake_device, of, t.storage_offset(), state))
    return kind, made


def empty_fake(mode: FakeTensorMode, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> FakeTensor:
    """torch.empty_strided as the mode makes it, past all other modes."""
    with no_dispatch():
        return FakeTensor(mode, torch.empty_strided(size, stride, dtype=dtype, device="meta"), device)


def fills_storage(t: torch.Tensor) -> bool:
    """Whether a tensor's storage is as large as torch.empty_strided would make it."""
    last = sum((n - 1) * step for n, step in zip(t.size(), t.stride(), strict=True)) if t.numel() else -1
    return t.storage_offset() == 0 and t.untyped_storage().nbytes() == (last + 1) * t.element_size()
