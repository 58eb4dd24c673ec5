"""Codecs: pairs encode/decode over the kernels. ``CODECS`` names them all."""

from __future__ import annotations

import difflib

from gistkit.codecs.base import Codec, Encoded, aligned, dtype_of, restored
from gistkit.codecs.plain import Argmax, Bits, Dense, Integers, Mask1, Narrow, unchanged
from gistkit.codecs.sparse import Sparse
from gistkit.formats import INT_FORMS, VALUE_FORMS

CODECS: dict[str, Codec] = {
    "dense": Dense("dense"),
    "mask1": Mask1("mask1"),
    "bits": Bits("bits"),
    "argmax4": Argmax("argmax4", 4),
    "argmax8": Argmax("argmax8", 8),
    "zvc": Sparse("zvc", "zvc"),
    "csr": Sparse("csr", "csr"),
    **{name: Narrow(name, *form) for name, form in VALUE_FORMS.items()},
    **{name: Integers(name, bits) for name, bits in INT_FORMS.items()},
    **{f"zvc+{name}": Sparse(f"zvc+{name}", "zvc", *form) for name, form in VALUE_FORMS.items()},
    **{f"csr+{name}": Sparse(f"csr+{name}", "csr", *form) for name, form in VALUE_FORMS.items()},
}


def codec(name: str) -> Codec:
    """The codec of that name. Raises ValueError, naming the nearest and all known names, for any other."""
    if name in CODECS:
        return CODECS[name]
    near = difflib.get_close_matches(str(name), CODECS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"codec: name must be one of {', '.join(CODECS)}; got {name!r}{hint}")
