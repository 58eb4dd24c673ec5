"""Forms: how a storage spends the time between its two uses. One row a form, pure data (docs/concepts.md has a table);
no other module compares their names. :mod:`gistkit.codecs` has encoder and decoder of every form with a payload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gistkit import formats
from gistkit.formats import INT_FORMS, VALUE_FORMS

STAY, DECODING, OPERATORS, RERUN, NEVER = "stay", "decoding", "operators", "rerun", "never"
"""How the values of a storage come back."""
KERNEL_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes that the kernels encode."""
Size = Callable[[int, int, float | None], int]
"""(elements, bytes an element, density) -> bytes of the payload."""


@dataclass(frozen=True, eq=False)
class Form:
    """One form; each is there once. ``returns``: one of the words above. ``signs``: the form alone tells a ReLU's
    backward where the gradient passes; a ReLU's output in any other form needs ``Decision.mask`` beside it. ``dtypes``:
    those it can hold, None for any. ``rounds_to``: the narrow format of its values, '' where every bit comes back.
    ``sparse``: its size depends on the values, so only the device knows it. ``made_by_op``: an operator writes it."""

    name: str
    returns: str
    signs: bool = False
    dtypes: tuple[str, ...] | None = KERNEL_DTYPES
    rounds_to: str = ""
    sparse: bool = False
    made_by_op: bool = False
    size: Size | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple:
        return _named, (self.name,)

    @property
    def values(self) -> bool:
        """Whether backward finds the values, rounded where the form rounds."""
        return self.returns != NEVER

    @property
    def payload(self) -> bool:
        """Whether anything is kept between the uses. Only that can lie on the host."""
        return self.size is not None

    @property
    def gone(self) -> bool:
        """Whether nothing is kept and nothing comes back."""
        return not self.payload and not self.values

    @property
    def decoded_by_reader(self) -> bool:
        """Whether each reader decodes the values for itself: a rerun may, and lets go of them before it ends."""
        return self.returns == DECODING and not self.made_by_op

    @property
    def lossless(self) -> bool:
        """Whether decoding gives every bit of the storage back."""
        return self.payload and not self.rounds_to and (self.values or self.made_by_op)

    def nbytes(self, elements: int, item_bytes: int, density: float | None = None) -> int:
        """Bytes between the uses of so many elements of ``item_bytes`` each. ``density`` is the share of elements whose
        bit pattern is not zero, which sparse forms keep; None means all of them."""
        return 0 if self.size is None else self.size(elements, item_bytes, density)


def _bits(elements: int, item_bytes: int, density: float | None) -> int:
    return formats.mask1_bytes(elements)


def _narrow(name: str) -> Size:
    return lambda elements, item_bytes, density: formats.narrow_bytes(*VALUE_FORMS[name], elements)


def _integers(bits: int) -> Size:
    return lambda elements, item_bytes, density: formats.int_bytes(bits, elements)


def _sparse_rows(layout: str, places: Callable[[int, int], int]) -> list[Form]:
    """A sparse layout alone and with each narrow float. ``places``: bytes of where the stored elements stood."""

    def row(narrow: str) -> Form:
        def size(elements: int, item_bytes: int, density: float | None) -> int:
            stored = elements if density is None else round(density * elements)
            values = formats.narrow_bytes(*VALUE_FORMS[narrow], stored) if narrow else stored * item_bytes
            return places(elements, stored) + values

        name = f"{layout}+{narrow}" if narrow else layout
        return Form(name, DECODING, signs=True, rounds_to=narrow, sparse=True, size=size)

    return [row(narrow) for narrow in ("", *VALUE_FORMS)]


def _map(bits: int) -> Form:
    size: Size = lambda elements, item_bytes, density: formats.argmax_bytes(elements, bits)  # noqa: E731
    return Form(f"argmax{bits}", NEVER, dtypes=("uint8",), made_by_op=True, size=size)


_ROWS = (
    Form("dense", STAY, signs=True, dtypes=None, size=lambda elements, item_bytes, density: elements * item_bytes),
    Form("mask1", NEVER, signs=True, size=_bits),
    Form("bits", DECODING, dtypes=("bool",), made_by_op=True, size=_bits),
    _map(4),
    _map(8),
    *_sparse_rows("zvc", lambda elements, stored: formats.zvc_meta_bytes(elements)),
    *_sparse_rows("csr", formats.csr_meta_bytes),
    *(Form(name, DECODING, rounds_to=name, size=_narrow(name)) for name in VALUE_FORMS),
    *(Form(name, DECODING, rounds_to=name, size=_integers(bits)) for name, bits in INT_FORMS.items()),
    Form("rebuild", OPERATORS, signs=True, dtypes=None),
    Form("recompute", RERUN, signs=True, dtypes=None),
    Form("drop", NEVER, dtypes=None),
)
FORMS: dict[str, Form] = {form.name: form for form in _ROWS}
"""Every form by its name."""


def zeros_left_out(narrow: str | None) -> str:
    """The bitmap form whose values are in a narrow format: ``zvc+fp8`` of ``fp8``; ``zvc`` where there is none."""
    return f"zvc+{narrow}" if f"zvc+{narrow}" in FORMS else "zvc"


def _named(name: str) -> Form:
    return FORMS[name]
