"""lossy="auto": a format for every storage that Gist's rules would round, from what each does to the gradients.

For every such storage s and format f one step of a copy with that stash alone in that form gives e[s, f], the relative
error of all gradients together. Model: the errors of different stashes are independent with mean zero, as those of
stochastic rounding are (ActNN, ICML 2021), so their squares add; rounding to nearest is taken for the same. Of all
assignments with sum of e**2 <= max_error**2, s exact allowed, the one of least kept bytes is taken
(:mod:`gistkit.planning.knapsack`) and measured as a whole; above the bound, that shrinks by the ratio for another. One
format for all that is smaller and within the bound is taken instead. Steps are tried on copies (:class:`TrialSteps`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import hypot, inf, isfinite, sqrt
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from gistkit.capture import (
    loss_of,
    no_autocast_cache,
    on_copy,
    others_untouched,
    plain_copy,
    tensors_in,
    untouched_random_states,
)
from gistkit.errors import MeasureError
from gistkit.formats import AUTO, MAX_ERROR, Lossy
from gistkit.ir import Plan, SavedGraph
from gistkit.planning import Choice, least_bytes_within
from gistkit.planning.policies import gist
from gistkit.runtime.calls.interpose import interposed
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.program.program import Program, Settings
from gistkit.runtime.sparse_sizes.exact import ExactPacker

Gradients = dict[str, torch.Tensor]
LossFn = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class GradientError:
    """Of one layer's gradient, weight and bias together: the norm of what is wrong over the norm of the exact one (inf
    where that is 0, nan where something is not finite), and the cosine between the two."""

    relative: float
    cosine: float


def gradient_error(exact: Gradients, found: Gradients) -> GradientError:
    """How far ``found`` is from ``exact``, whose names it must have; all gradients together. Waits for the device."""
    sums = []
    for name, e in exact.items():
        a, b = e.double(), found[name].double()
        sums.append(torch.stack(((b - a).square().sum(), a.square().sum(), b.square().sum(), (a * b).sum())))
    if not sums:
        return GradientError(0.0, 1.0)
    wrong, own, other, product = torch.stack([each.to(sums[0].device) for each in sums]).sum(0).tolist()
    relative = sqrt(wrong / own) if own else (inf if wrong else 0.0)
    if not wrong:
        return GradientError(0.0, 1.0)
    return GradientError(relative, product / sqrt(own * other) if own and other else 0.0)


class TrialSteps:
    """Steps of copies of a model on one batch, each from the same state. The model, its gradients, the inputs and all
    random states stay as they are. The loss is that of :func:`gistkit.capture.loss_of`."""

    def __init__(
        self, model: torch.nn.Module, inputs: tuple[tuple, dict], targets: tuple = (), loss_fn: LossFn | None = None
    ) -> None:
        self._model, self._inputs, self._targets, self._loss_fn = model, inputs, targets, loss_fn

    def gradients(self, forward: Callable[[torch.nn.Module, tuple, dict], Any] | None = None) -> Gradients:
        """By parameter, of one step; ``forward(copy, args, kwargs)`` runs the copy's forward, None as it is."""
        twin = plain_copy(self._model)
        twin.zero_grad(set_to_none=True)
        args, kwargs = tree_map_only(torch.Tensor, _apart, self._inputs)
        with untouched_random_states(), torch.enable_grad(), no_autocast_cache():
            out = twin(*args, **kwargs) if forward is None else forward(twin, args, kwargs)
            loss = loss_of(out, self._targets, on_copy(self._loss_fn, self._model, twin))
            # backward runs outside of the forward's autocast
            with others_untouched(loss, twin.parameters()), torch.autocast(loss.device.type, enabled=False):
                loss.backward()
        return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def _apart(t: torch.Tensor) -> torch.Tensor:
    """A copy of an input without its history, on which no gradient of the caller's can arrive."""
    made = t.detach().clone().requires_grad_(t.requires_grad)
    return made if t.is_leaf else made.clone()


def at_random(out: Any) -> torch.Tensor:
    """A loss of an output whose loss nobody knows: its own ``loss`` where it has one, else the sum of all its tensors
    times a cotangent of normal numbers, drawn with seed 0."""
    if isinstance(getattr(out, "loss", None), torch.Tensor):
        return out.loss
    drawn = torch.Generator().manual_seed(0)
    found = [t for t in tensors_in(out) if t.is_floating_point() and t.requires_grad]
    return loss_of([t * torch.randn(t.shape, generator=drawn).to(t) for t in found], (), None)


CANDIDATES = ("fp16", "fp8s", "int4s", "int2s")
"""Formats to choose from, the most precise first."""
ROUNDS, TINY = 6, 1e-300
MODEL = "errors of stashes are independent with mean zero: their squares add"


@dataclass(frozen=True)
class Assignment:
    """The format of each storage that is rounded; the relative error of all gradients together, allowed, expected by
    the model and measured; the steps that were taken; the bytes kept for backward, and those without rounding."""

    formats: dict[int, str]
    max_error: float
    expected_error: float = 0.0
    measured_error: float = 0.0
    steps: int = 0
    kept_bytes: int = 0
    exact_bytes: int = 0

    def details(self) -> dict[str, Any]:
        found = {**asdict(self), "formats": {str(s): name for s, name in self.formats.items()}}
        return {"lossy": AUTO, "auto": {"model": MODEL, **found}}

    def __str__(self) -> str:
        counts = ((name, list(self.formats.values()).count(name)) for name in CANDIDATES)
        shown = ", ".join(f"{count} to {name}" for name, count in counts if count) or "none"
        return (
            f'lossy="auto": storages rounded: {shown}; {self.kept_bytes} bytes kept, {self.exact_bytes} without; '
            f"gradient error {self.measured_error:.3g} measured, {self.max_error:g} allowed, in {self.steps} steps"
        )


def check_max_error(caller: str, max_error: float) -> None:
    """Raise ValueError for what is no share between 0 and 1."""
    if type(max_error) not in (int, float) or not 0 < max_error < 1:
        raise ValueError(
            f"{caller}: max_error must be a share above 0 and below 1, the relative error of the gradients that "
            f'lossy="auto" allows, got {max_error!r}; {MAX_ERROR} is the default'
        )


def assigned(
    graph: SavedGraph, trial: TrialSteps, max_error: float, densities: Mapping[int, float] | None = None
) -> Assignment:
    """The assignment of least kept bytes for a captured step, which it follows from alone, with torch.initial_seed().
    ``densities`` as :func:`gist` takes them. Raises MeasureError where no parameter gets a gradient."""
    plans = {name: gist(graph, lossy=name, densities=densities) for name in CANDIDATES}
    rounded = {name: [d.storage for d in p.decisions if d.form.rounds_to] for name, p in plans.items()}
    if not any(rounded.values()):
        return Assignment({}, max_error)
    lab = _Lab(graph, trial, densities)
    formats, expected = _within(lab, _groups(lab, rounded), max_error)
    for name in sorted(CANDIDATES, key=lambda name: plans[name].kept_bytes):
        same = dict.fromkeys(rounded[name], name)
        if lab.plan(same).kept_bytes < lab.plan(formats).kept_bytes and lab.error(same) <= max_error:
            formats, expected = same, lab.error(same)
            break
    kept = (lab.plan(each).kept_bytes for each in (formats, {}))
    return Assignment(formats, max_error, expected, lab.error(formats), len(lab.errors), *kept)


class Formats:
    """What may be rounded in one model's forwards: the caller's format or, for AUTO, an assignment of each."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._found: dict[str, tuple[int, Assignment]] = {}

    def of(self, graph: SavedGraph) -> Lossy:
        """The format of all, or those by storage of a forward that :meth:`renew` has seen."""
        auto = self._settings.lossy == AUTO
        return self._found[graph.fingerprint][1].formats if auto else self._settings.lossy

    def renew(self, graph: SavedGraph, model: torch.nn.Module, inputs: tuple[tuple, dict], step: int) -> bool:
        """Whether formats were measured now: for a new forward, or ``remeasure_every`` steps after the last time."""
        every, (last, _) = self._settings.remeasure_every, self._found.get(graph.fingerprint, (-1, None))
        if self._settings.lossy != AUTO or (last >= 0 and (not every or step - last < every)):
            return False
        trial = TrialSteps(model, inputs, loss_fn=at_random)
        self._found[graph.fingerprint] = step, assigned(graph, trial, self._settings.max_error)
        return True

    @property
    def notes(self) -> list[str]:
        return [str(assignment) for _, assignment in list(self._found.values())]


class _Lab:
    """Plans and measured errors of assignments on one step, each once."""

    def __init__(self, graph: SavedGraph, trial: TrialSteps, densities: Mapping[int, float] | None) -> None:
        self._graph, self._trial, self._densities = graph, trial, densities
        self.errors: dict[tuple, float] = {(): 0.0}
        self._verified: dict = {}
        self._exact = trial.gradients()
        if not self._exact:
            raise MeasureError(
                'lossy="auto" needs a parameter that gets a gradient, and none did; train one, or name a format'
            )

    def plan(self, formats: Mapping[int, str]) -> Plan:
        return gist(self._graph, lossy=formats, densities=self._densities)

    def error(self, formats: Mapping[int, str]) -> float:
        """The relative error of a step under this assignment; inf where something is not finite."""
        key = tuple(sorted(formats.items()))
        if key not in self.errors:
            found = self._trial.gradients(_under(Program(self._graph, self.plan(formats)), self._verified))
            error = gradient_error(self._exact, found).relative
            self.errors[key] = error if isfinite(error) else inf
        return self.errors[key]


def _under(program: Program, verified: dict) -> Callable[[torch.nn.Module, tuple, dict], Any]:
    """Runs a forward under a plan; ``verified``: what is known of rebuilds already."""

    def forward(twin: torch.nn.Module, args: tuple, kwargs: dict) -> Any:
        state = ForwardState(Settings(AUTO), ExactPacker(), program, verified=verified)
        try:
            with interposed(state):
                out = twin(*args, **kwargs)
            state.finish()
            return out
        finally:
            state.clear()

    return forward


def _groups(lab: _Lab, rounded: Mapping[str, list[int]]) -> dict[int, dict[str, Choice]]:
    """By storage what may become of it, '' (exact) first; a format only where it saves bytes over those before it."""
    groups: dict[int, dict[str, Choice]] = {}
    exact_bytes = lab.plan({}).kept_bytes
    for name in CANDIDATES:
        for storage in rounded[name]:
            group = groups.setdefault(storage, {"": Choice(0.0, 0)})
            saved_bytes = lab.plan({storage: name}).kept_bytes - exact_bytes
            if saved_bytes < min(choice.nbytes for choice in group.values()):
                group[name] = Choice(lab.error({storage: name}), saved_bytes)
    return groups


def _within(lab: _Lab, groups: dict[int, dict[str, Choice]], max_error: float) -> tuple[dict[int, str], float]:
    """Formats whose error together is within the bound, and what the model expects; none where it is too far off."""
    bound = max_error
    for _ in range(ROUNDS):
        taken = least_bytes_within([list(group.values()) for group in groups.values()], bound)
        picked = {s: list(group)[i] for (s, group), i in zip(groups.items(), taken, strict=True)}
        formats = {s: name for s, name in picked.items() if name}
        expected, error = hypot(*(groups[s][name].error for s, name in picked.items())), lab.error(formats)
        if error <= max_error:
            return formats, expected
        bound = max(min(bound, expected) * max_error / error, TINY)
    return {}, 0.0
