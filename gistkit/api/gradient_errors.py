"""fidelity: the error that each lossy stash brings into the gradients by itself, against exact ones of that batch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gistkit.api.measuring import check_real
from gistkit.capture import capture, check_runs_in_python, spread
from gistkit.errors import MeasureError, PlanError
from gistkit.ir import Plan, SavedGraph
from gistkit.planning.forms import check_lossy
from gistkit.planning.policies import gist
from gistkit.report import plot_errors, rendered, table
from gistkit.runtime import GradientError, Gradients, TrialSteps, compress, gradient_error

SHOWN = 40


@dataclass(frozen=True)
class StashError:
    """What one lossy stash does by itself: the tensor (its storage in the plan, the operator and module that made it,
    shape), the form, bytes exact and kept, the error of all gradients together and by layer."""

    storage: int
    op: str
    module: str
    shape: tuple[int, ...]
    form: str
    plain_bytes: int
    kept_bytes: int
    error: GradientError
    layers: dict[str, GradientError]

    @property
    def bits(self) -> float:
        """Bits that it keeps for every element."""
        return 8 * self.kept_bytes / max(1, math.prod(self.shape))

    @property
    def worst_layer(self) -> str:
        """The layer whose gradient is the most wrong, '' without any."""
        return max(self.layers, key=lambda name: _rank(self.layers[name]), default="")


@dataclass(frozen=True)
class Fidelity:
    """What :func:`gistkit.fidelity` found: ``rows``, one a lossy stash, the most harmful first; ``together``, the error
    with all of them at once; ``repeat``, that of a second exact step, 0 where the device repeats its bits."""

    rows: tuple[StashError, ...]
    together: GradientError
    repeat: GradientError

    def __str__(self) -> str:
        names = ">storage", "made by", "module", "shape", "form", ">bits", ">gradient error", ">1 - cosine"
        caption = f"all at once: {_shown(self.together)}; a second exact step: {_shown(self.repeat)}"
        made = table("Gradient error of each lossy stash by itself", *names, "worst layer", caption=caption)
        for r in self.rows[:SHOWN]:
            shape = "x".join(map(str, r.shape))
            figures = f"{r.bits:.1f}", f"{r.error.relative:.2e}", f"{1 - r.error.cosine:.2e}"
            made.add_row(str(r.storage), r.op, r.module, shape, r.form, *figures, r.worst_layer)
        if len(self.rows) > SHOWN:
            made.add_row("", f"and {len(self.rows) - SHOWN} more, less harmful")
        return rendered([made], 150)

    def to_json(self) -> str:
        """The figures as JSON text."""
        return json.dumps(asdict(self))

    def plot(self, path: str | Path) -> None:
        """Draw the relative error of every layer's gradient (columns) by stash (rows) and write the picture. Overwrites
        ``path``. Needs matplotlib (``gistkit[plot]``)."""
        layers = list(dict.fromkeys(name for r in self.rows for name in r.layers))
        names = [f"{r.module or r.op} ({r.form})" for r in self.rows]
        errors = [[r.layers[name].relative if name in r.layers else 0.0 for name in layers] for r in self.rows]
        plot_errors(names, layers, errors, Path(path))


def fidelity(
    model: torch.nn.Module, *batch: Any, lossy: str | Plan = "fp8", loss_fn: Callable[..., torch.Tensor] | None = None
) -> Fidelity:
    """Which lossy stash harms which layer's gradient, and how much, on one batch.

    ``lossy`` is a format (``"fp8"``, ``"fp10s"``, ...), for what ``gistkit.compress(model, lossy=...)`` would round, or
    a lossy :class:`gistkit.Plan` of this model and batch. Every storage that it rounds is rounded alone in one step of
    the model, all others kept exactly, and the gradients of the parameters are compared with those of an exact step. So
    a plan of n rounded storages takes n + 3 steps. All run on copies, in the model's present mode, from the present
    random state: the model, its gradients and all random states stay as they are. ``batch`` and ``loss_fn`` as
    :func:`gistkit.plan` takes them, but real.

    Returns a :class:`Fidelity`. Raises ValueError for an unknown format and fake tensors, TypeError for what is neither
    format nor plan, PlanError for a plan that rounds nothing, PlanMismatchError for a plan of another step,
    CaptureError where the model cannot be captured, :class:`gistkit.MeasureError` where no parameter gets a gradient.
    """
    check_runs_in_python("fidelity", model)
    if not isinstance(lossy, str | Plan):
        raise TypeError(f"fidelity: lossy must be a format or a gistkit.Plan, got {type(lossy).__name__}; pass 'fp8'")
    if isinstance(lossy, str):
        check_lossy(lossy)
    check_real("fidelity", model, batch)
    inputs = (batch, {}) if loss_fn is None else spread(batch[0])
    steps = TrialSteps(model, inputs, () if loss_fn is None else batch[1:], loss_fn)
    graph = capture(model, *inputs, on_cpu=isinstance(lossy, Plan))
    plan = gist(graph, lossy=lossy) if isinstance(lossy, str) else lossy
    rounded = [d for d in plan.decisions if d.form.rounds_to]
    if not rounded:
        got = f"one of policy {plan.policy!r} that rounds nothing"
        raise PlanError(f"fidelity: the plan must round something, got {got}; plan with lossy='fp8'")
    exact, again = steps.gradients(), steps.gradients()
    if not exact:
        raise MeasureError("fidelity: the model must have parameters that get a gradient, and none did; train some")
    rows = [_row(graph, plan, d.storage, exact, steps) for d in rounded]
    rows.sort(key=lambda r: _rank(r.error), reverse=True)
    return Fidelity(tuple(rows), gradient_error(exact, _under(plan, steps)), gradient_error(exact, again))


def _under(plan: Plan, steps: TrialSteps) -> Gradients:
    return steps.gradients(lambda twin, args, kwargs: compress(twin, plan)(*args, **kwargs))


def _row(graph: SavedGraph, plan: Plan, storage: int, exact: Gradients, steps: TrialSteps) -> StashError:
    alone = tuple(d for d in plan.decisions if d.storage == storage or not d.form.rounds_to)
    (decision,) = (d for d in alone if d.storage == storage)
    found = _under(replace(plan, decisions=alone), steps)
    known, writers = graph.storages[storage], graph.writers(storage)
    origin = (writers[-1].op, writers[-1].module) if writers else ("input", "")
    kept_bytes = decision.kept_bytes(known.nbytes, known.dtype, known.density)
    layers = {name: gradient_error(own, found) for name, own in _by_layer(exact).items()}
    figures = known.nbytes, kept_bytes, gradient_error(exact, found), layers
    return StashError(storage, *origin, known.shape, decision.codec, *figures)


def _by_layer(gradients: Mapping[str, torch.Tensor]) -> dict[str, Gradients]:
    layers: dict[str, Gradients] = {}
    for name, gradient in gradients.items():
        layers.setdefault(name.rpartition(".")[0], {})[name] = gradient
    return layers


def _rank(error: GradientError) -> float:
    return error.relative if math.isfinite(error.relative) else math.inf


def _shown(error: GradientError) -> str:
    return f"{error.relative:.2e} (1 - cosine {1 - error.cosine:.2e})"
