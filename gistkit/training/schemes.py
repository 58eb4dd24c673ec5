"""Schemes: where in a training step which values are rounded.

| name | what is rounded |
|---|---|
| `fp32` | nothing |
| `fp8`, `fp8s`, ... | delayed (Gist, III-B): what is kept for backward, as ``gistkit.compress(lossy=...)`` does |
| `auto` | the same, each stash in a format of its own: the plan of ``gistkit.plan(lossy="auto")`` for seed 0's start |
| `auto:0.03`, ... | `auto` within another ``max_error`` than the default |
| `zvc+fp8`, `csr+fp8`, ... | the same tensors, all of them in that sparse layout |
| `immediate:fp8`, ... | the paper's All-FP control: every module's output as it is made, so the error goes on forward |
| `gradients:fp8`, ... | the gradient of every module's output, in backward; all activations are exact |

A module is a leaf (``nn.Conv2d``, ``nn.ReLU``, ...); what plain functions return is not rounded by the two controls.
``immediate`` also rounds in evaluation, where the network is the same one, and passes gradients through unrounded.
``gradients`` rounds the gradient of the loss *summed* over the batch, as the paper's CNTK has it: the mean's gradients,
a batch smaller, would mostly fall below the unscaled formats' least normal number and be flushed to zero.
The controls keep their rounded values in fp32, so they say nothing of memory.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from gistkit.codecs import CODECS, Codec
from gistkit.errors import PlanError
from gistkit.formats import AUTO, MAX_ERROR
from gistkit.ir import Plan, SavedGraph
from gistkit.planning.forms import Judge, call_choices
from gistkit.planning.policies import gist
from gistkit.runtime import compress

EXACT, DELAYED, IMMEDIATE, GRADIENTS = "fp32", "delayed", "immediate", "gradients"


@dataclass(frozen=True)
class Scheme:
    """One scheme: its name, its kind (EXACT, DELAYED, IMMEDIATE, GRADIENTS), the codec that rounds ('' for none), and
    the gradients' error that ``auto`` allows."""

    name: str
    kind: str
    codec: str
    max_error: float = MAX_ERROR


def schemes() -> dict[str, Scheme]:
    """Every scheme by its name: one a lossy codec, ``auto``, and the controls of codecs without a sparse layout."""
    lossy = [name for name, codec in CODECS.items() if codec.form.rounds_to]
    found = [Scheme(EXACT, EXACT, ""), *(Scheme(name, DELAYED, name) for name in (*lossy, AUTO))]
    for kind in (IMMEDIATE, GRADIENTS):
        found += [Scheme(f"{kind}:{name}", kind, name) for name in lossy if not CODECS[name].form.sparse]
    return {scheme.name: scheme for scheme in found}


def scheme(name: str) -> Scheme:
    """The scheme of that name. Raises ValueError, naming the nearest and all known names, for any other, and for an
    ``auto`` whose error is no share."""
    known = schemes()
    if name in known:
        return known[name]
    kind, _, bound = name.partition(":")
    if kind == AUTO:
        with suppress(ValueError):
            max_error = float(bound)
            if 0 < max_error < 1:
                return replace(known[AUTO], name=name, max_error=max_error)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"scheme must be one of {', '.join(known)}; got {name!r}{hint}")


def plan_of(scheme: Scheme, graph: SavedGraph) -> Plan | None:
    """The plan that carries a delayed scheme of one codec out, None for the others: that of the Gist policy, which
    ``compress(lossy=...)`` follows too, made once, so that no measured density changes it on the way.

    Raises PlanError where it would round nothing of the step.
    """
    if scheme.kind != DELAYED:
        return None
    form = CODECS[scheme.codec].form
    plan = gist(graph, lossy=form.rounds_to)
    if not any(d.form.rounds_to for d in plan.decisions):
        what = f"scheme {scheme.name} must round something of what the network keeps, and all of that is small or exact"
        raise PlanError(f"{what}; leave it out, or enlarge the batch")
    if not form.sparse:
        return plan
    judge = Judge(graph)
    decisions = tuple(d if not d.form.rounds_to else judge.allowed(d.storage, (form.name,))[0] for d in plan.decisions)
    return replace(plan, decisions=decisions, choices=call_choices(judge.reading, {d.storage: d for d in decisions}))


def carry_out(scheme: Scheme, plan: Plan | None, model: torch.nn.Module) -> None:
    """Change the model in place so that it trains under the scheme; ``plan`` is :func:`plan_of`'s."""
    if plan is not None:
        compress(model, plan)
    elif scheme.kind != EXACT:
        hook = (_round_output if scheme.kind == IMMEDIATE else _round_gradient)(CODECS[scheme.codec])
        for module in model.modules():
            if not any(True for _ in module.children()):
                module.register_forward_hook(hook)


class _Round(torch.autograd.Function):
    """decode(encode(x)); the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codec: Codec) -> torch.Tensor:
        # a copy: what is decoded is a view, into which the next module, an in-place ReLU, may not write
        return codec.decode(codec.encode(x)).clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


def _round_output(codec: Codec) -> Callable:
    def rounded(x: torch.Tensor) -> Any:
        return _Round.apply(x, codec) if x.is_floating_point() else x

    return lambda module, args, output: tree_map_only(torch.Tensor, rounded, output)


def _round_gradient(codec: Codec) -> Callable:
    def rounded(grad: torch.Tensor) -> torch.Tensor:
        rows = len(grad) if grad.dim() else 1
        return codec.decode(codec.encode(grad * rows)) / rows

    def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
        for x in tree_leaves(output):
            # also where the next module writes in place: the hook stays with what was there before
            if isinstance(x, torch.Tensor) and x.requires_grad:
                x.register_hook(rounded)

    return hook
