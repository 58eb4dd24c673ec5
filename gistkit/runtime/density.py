"""Shares of stored elements, as the sparse encodings of a step report them: no extra pass, no waiting."""

from __future__ import annotations

from gistkit.codecs import CODECS, Encoded, Sparse


def density(encoded: Encoded) -> float | None:
    """Stored elements over all elements, from the sizes of the packed payload (fp10: to two elements); None while
    the count is on its way, and for codecs that are not sparse."""
    codec = CODECS[encoded.codec]
    if not isinstance(codec, Sparse) or encoded.pending or encoded.numel == 0:
        return None
    codes_per_item = 3 if codec.value_format == "fp10" else 1
    return min(1.0, encoded.payload[2].numel() * codes_per_item / encoded.numel)
