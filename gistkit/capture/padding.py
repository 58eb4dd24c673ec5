"""Attention masks that hide nothing, which transformers' decoders leave out where they see that."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

MASK = "attention_mask"


def without_idle_masks(model: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A forward's arguments with None for each ``attention_mask`` that hides nothing, where a decoder of
    transformers has fewer heads of keys than of queries: on real values it leaves such a mask out and runs its
    attentions by other calls, which it cannot know on fake ones."""
    if not any(_shares_keys(part) for part in model.modules()):
        return args, kwargs
    return _without(args), _without(kwargs)


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
