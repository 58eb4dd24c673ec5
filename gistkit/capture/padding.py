"""What transformers' models see of values on real tensors and cannot see on fake ones: attention masks that hide
nothing, which decoders leave out, and positions that show several sequences in a row of the batch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

MASK, POSITIONS = "attention_mask", "position_ids"


def without_idle_masks(model: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A forward's arguments with None for each ``attention_mask`` that hides nothing, where a decoder of
    transformers has fewer heads of keys than of queries: on real values it leaves such a mask out and runs its
    attentions by other calls, which it cannot know on fake ones."""
    if not any(_shares_keys(part) for part in model.modules()):
        return args, kwargs
    return _without(args), _without(kwargs)


@contextmanager
def own_positions(given: Any) -> Iterator[None]:
    """Within this block positions that a model of transformers counts itself, as none are among what is ``given``, show
    one sequence a row: it looks for more where it has no mask and no cache."""
    library: Any = sys.modules.get("transformers.masking_utils")
    look = getattr(library, "find_packed_sequence_indices", None)
    if look is None or _names(given, POSITIONS):
        yield
        return

    asks = library.is_tracing

    def found(position_ids: torch.Tensor) -> None:
        library.is_tracing = lambda *_: True  # so it does not ask for the value of what the last line here makes
        try:
            packed = look(position_ids)
        finally:
            library.is_tracing = asks
        (packed[:, -1] == 0).all()

    library.find_packed_sequence_indices = found
    try:
        yield
    finally:
        library.find_packed_sequence_indices = look


def _names(item: Any, name: str) -> bool:
    parts = item.values() if isinstance(item, dict) else item if isinstance(item, (tuple, list)) else ()
    return (isinstance(item, dict) and item.get(name) is not None) or any(_names(part, name) for part in parts)


def _shares_keys(part: torch.nn.Module) -> bool:
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(part, library.PreTrainedModel):
        return False
    config: Any = part.config
    heads, keys = (getattr(config, f"num_{name}_heads", None) for name in ("attention", "key_value"))
    return None not in (heads, keys) and heads != keys and getattr(config, "_attn_implementation", "") == "sdpa"


def _without(item: Any) -> Any:
    if type(item) in (tuple, list):
        return type(item)(_without(value) for value in item)
    if type(item) is not dict:
        return item
    return {key: None if key == MASK and _hides_nothing(value) else _without(value) for key, value in item.items()}


def _hides_nothing(mask: Any) -> bool:
    real = isinstance(mask, torch.Tensor) and not isinstance(mask, FakeTensor) and not mask.is_meta
    return real and mask.dim() == 2 and bool(mask.all())
