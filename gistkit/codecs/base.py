"""What a codec is, and what it leaves behind.

A codec works in storage order: it sees a tensor as the flat run of its elements in memory, so any rank and any dense
layout cost nothing, and shape and strides ride along on the host. A tensor with gaps or overlaps is copied into a dense
layout of the same order of dimensions first, and decodes to that layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from gistkit.errors import GistError
from gistkit.ir import FORMS
from gistkit.kernels import flat, is_dense

DEVICES = ("cpu", "cuda")


def dtype_of(name: str) -> torch.dtype:
    """torch.float32 for ``float32``."""
    return getattr(torch, name)


class Encoded:
    """One tensor under one codec: the payload's tensors and the geometry of the original, on the host.

    Everything is fixed but for one step: a sparse encoding that starts as its worst-case scratch, or in arrays of a
    forecast size (``pending``), is settled once, which swaps payload, flag and spill in a single assignment. A thread
    that decodes takes :meth:`state` once and works on what belongs together, before or after the swap. ``nonzeros`` is
    the number of elements that sparse storage keeps, None while it is not known and for codecs that keep all.

    The spill is memory of somebody else's for what a forecast has no room for. The very tensor that was handed in is
    held as long as something may have to be read from it, by every encoding that :meth:`over` makes as well.
    """

    __slots__ = ("__weakref__", "_state", "codec", "dtype", "extra", "nonzeros", "numel", "shape", "stride")

    def __init__(
        self,
        codec: str,
        payload: tuple[torch.Tensor, ...],
        geometry: torch.Tensor,
        extra: tuple[int, ...] = (),
        pending: bool = False,
        nonzeros: int | None = None,
        spill: torch.Tensor | None = None,
    ) -> None:
        self.codec = codec
        self.shape = geometry.shape
        self.stride = geometry.stride()
        self.dtype = geometry.dtype
        self.numel = geometry.numel()
        self.extra = extra
        self.nonzeros = nonzeros
        self._state = (payload, pending, spill)

    @property
    def payload(self) -> tuple[torch.Tensor, ...]:
        """The tensors that are held now."""
        return self._state[0]

    @property
    def pending(self) -> bool:
        """True while the host does not know yet how many elements a sparse encoding has stored."""
        return self._state[1]

    def state(self) -> tuple[tuple[torch.Tensor, ...], bool, torch.Tensor | None]:
        """(payload, pending, spill), consistent with each other whatever other threads do. With a spill the payload is
        packed, pending or not; without one, pending means a scratch."""
        return self._state

    def settle(
        self, payload: tuple[torch.Tensor, ...], nonzeros: int | None, spill: torch.Tensor | None = None
    ) -> None:
        """Replace a pending payload by its final form, with the spill that this still needs. nonzeros may be None where
        the arrays are longer than what they store, and the host does not know by how much."""
        self.nonzeros = nonzeros
        self._state = (payload, False, spill)

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct storages that the payload holds; a view counts the whole storage behind it. A spill,
        which lies elsewhere, is not counted."""
        payload = self._state[0]
        if len(payload) == 1:
            return payload[0].untyped_storage().nbytes()
        storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in payload)}
        return sum(storages.values())

    def over(self, payload: tuple[torch.Tensor, ...], extra: tuple[int, ...] | None = None) -> Encoded:
        """The same encoding over another payload: copies of its tensors, or none for its geometry alone. The spill is
        the same memory, not a copy."""
        made = Encoded.__new__(Encoded)
        made.codec, made.shape, made.stride = self.codec, self.shape, self.stride
        made.dtype, made.numel, made.nonzeros = self.dtype, self.numel, self.nonzeros
        made.extra = self.extra if extra is None else extra
        _, pending, spill = self._state
        made._state = (payload, pending, spill)
        return made

    def __repr__(self) -> str:
        state = "pending, " if self.pending else ""
        return f"Encoded({self.codec}, {state}{tuple(self.shape)}, {self.dtype}, {self.nbytes} bytes)"


class Codec(ABC):
    """A pair encode/decode over one tensor. Stateless: one object serves all tensors and threads.

    ``form`` is its row in the table of forms, which says what it keeps and in how many bytes; ``lossless`` and
    ``dtypes`` (None: any) follow from it. ``relative_error``: how far a lossy codec may move a value, as a share of
    itself in its format's normal range, of integers as a share of the block's span; None where the codec is lossless,
    or keeps no values at all (``mask1``). No method waits for the device.
    """

    relative_error: float | None = None

    def __init__(self, name: str) -> None:
        self.name, self.form = name, FORMS[name]
        self.lossless = self.form.lossless
        self.dtypes = None if self.form.dtypes is None else tuple(map(dtype_of, self.form.dtypes))

    def accepts(self, x: torch.Tensor) -> str | None:
        """None where ``encode(x)`` works, else the reason why not, in words."""
        if x.layout != torch.strided:
            return f"layout {x.layout} is not torch.strided"
        if self.dtypes is not None and x.dtype not in self.dtypes:
            return f"dtype {x.dtype} is not {_any_of(self.dtypes)}"
        if x.device.type not in DEVICES and self.dtypes is not None:
            return f"device {x.device} has no kernels, only cpu and cuda have"
        return None

    def encode(self, x: torch.Tensor) -> Encoded:
        """The encoding of x (any rank, any strides). Raises TypeError where :meth:`accepts` names a reason."""
        return self._encode(self._checked(x))

    def _checked(self, x: torch.Tensor) -> torch.Tensor:
        reason = self.accepts(x)
        if reason is not None:
            raise TypeError(f"codec {self.name}: x cannot be encoded: {reason}; keep it under the codec 'dense'")
        return x.detach()

    @abstractmethod
    def _encode(self, x: torch.Tensor) -> Encoded: ...

    @abstractmethod
    def decode(self, encoded: Encoded) -> torch.Tensor:
        """The tensor: same shape, strides and dtype."""

    def relu_backward(self, encoded: Encoded, grad: torch.Tensor) -> torch.Tensor:
        """ReLU's input gradient, the encoded tensor being the ReLU's output; bit for bit ``aten::threshold_backward``.

        ``grad`` has the encoded tensor's shape, any strides; the result has the encoded tensor's strides. Raises
        GistError where the codec does not keep what this needs, ValueError for another shape.
        """
        raise GistError(
            f"codec {self.name} cannot mask a ReLU's gradient: of {encoded.dtype} values it does not keep which were "
            "positive; keep a mask1 of the ReLU's output beside it"
        )

    def predicted_bytes(self, n: int, dtype: torch.dtype, density: float | None = None) -> int:
        """Bytes of n elements of ``dtype`` once encoded (:meth:`gistkit.ir.Form.nbytes`)."""
        return self.form.nbytes(n, dtype.itemsize, density)


def _any_of(dtypes: Sequence[torch.dtype]) -> str:
    names = [str(d).removeprefix("torch.") for d in dtypes]
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def dense_layout(x: torch.Tensor) -> torch.Tensor:
    """x itself where it is dense and non-overlapping, else a copy in the dense layout of the same order of
    dimensions."""
    if x.is_neg():
        x = x.resolve_neg()
    return x if is_dense(x) else x.clone(memory_format=torch.preserve_format)


def restored(values: torch.Tensor, encoded: Encoded) -> torch.Tensor:
    """Decoded values in storage order as a tensor of the encoded one's geometry; no copy."""
    return values.as_strided(encoded.shape, encoded.stride)


def check_grad(grad: torch.Tensor, encoded: Encoded) -> None:
    """Raise ValueError unless the gradient has the encoded tensor's shape."""
    if grad.shape != encoded.shape:
        raise ValueError(
            f"relu_backward: grad must have the encoded tensor's shape {tuple(encoded.shape)}, got {tuple(grad.shape)}"
            "; pass the gradient of the ReLU's output"
        )


def aligned(grad: torch.Tensor, encoded: Encoded) -> tuple[torch.Tensor, bool]:
    """A gradient in the encoded tensor's storage order, flat, and whether it is a copy, which may be overwritten: made
    only where its strides differ, so that a ReLU's backward takes no more memory than the gradient and one result."""
    check_grad(grad, encoded)
    if grad.stride() == encoded.stride:
        return flat(grad), False
    strides = zip(grad.shape, grad.stride(), encoded.stride, strict=True)
    if not grad.numel() or all(size == 1 or got == want for size, got, want in strides):
        return flat(grad), False
    ordered = torch.empty_strided(encoded.shape, encoded.stride, dtype=grad.dtype, device=grad.device)
    return flat(ordered.copy_(grad)), True
