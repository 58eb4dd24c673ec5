"""Validates a plan passed to ``compress(model, plan)``: every decision must be executable, and the model's step must
match the planned one. Raises PlanError or PlanMismatchError."""

from __future__ import annotations

from collections import Counter
from operator import attrgetter

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gistkit.capture import GEOMETRY, Bound, batch_size, capture
from gistkit.errors import CaptureError, PlanError, PlanMismatchError
from gistkit.formats import AUTO
from gistkit.ir import FORMS, OPERATORS, PLACES, REMEDY, Plan, SavedGraph, StateTensor, is_recipe
from gistkit.kernels import ENGINE, engines_missing
from gistkit.planning import AGAIN, check_forward, check_inputs, check_same, check_state
from gistkit.planning.forms import check_decisions
from gistkit.runtime.program.program import Program
from gistkit.runtime.signature import AUTOCAST_DEVICES, autocast_now

Shapes = tuple[tuple[int, ...], ...]


def check_plan(plan: Plan, lossy: str | None = None) -> str | None:
    """The narrow format that the plan's decisions use, AUTO for several, None for none. Raises ValueError where
    ``lossy`` names another format, PlanError for a plan that means nothing, as a damaged file has it."""
    _check_words(plan)
    formats = {d.form.rounds_to for d in plan.decisions} - {""}
    planned = AUTO if len(formats) > 1 else min(formats, default=None)
    if any(ENGINE in c.algorithm for c in plan.choices):
        if plan.fidelity == "bitwise":
            _refuse("fidelity", "'reassociated', as it names engines of cuDNN", repr(plan.fidelity))
        if missing := engines_missing():
            raise PlanError(f"compress: plan runs convolutions by cuDNN's engines, and {missing}")
    if planned is not None and plan.fidelity != "lossy":
        _refuse("fidelity", f"'lossy', as it rounds to {' and '.join(sorted(formats))}", repr(plan.fidelity))
    if lossy is not None and lossy not in (planned, *formats) and planned is not None:
        raise ValueError(
            f"compress: lossy must be None or the plan's own format {planned!r}, got {lossy!r}; leave it out, or plan "
            f"with lossy={lossy!r}"
        )
    return planned


def _check_words(plan: Plan) -> None:
    seen: set[int] = set()
    for d in plan.decisions:
        what = f"the decision for storage {d.storage}"
        if d.storage < 0 or d.storage in seen:
            _refuse(what, "one for each storage", "a second one" if d.storage >= 0 else "no storage")
        seen.add(d.storage)
        if d.codec not in FORMS:
            _refuse(f"{what}: codec", f"one of {', '.join(FORMS)}", repr(d.codec))
        if d.place not in PLACES:
            _refuse(f"{what}: place", f"one of {', '.join(PLACES)}", repr(d.place))
        if d.form.returns == OPERATORS and not (d.recipe[:1] == ("relu",) and is_recipe(d.recipe)):
            _refuse(f"{what}: recipe", 'a ("relu", ...) of terms bn, stash, add and relu', repr(d.recipe))
    if plan.sub_batches < 1:
        _refuse("sub_batches", "at least 1", str(plan.sub_batches))


def _check_calls(plan: Plan, graph: SavedGraph) -> None:
    for d in plan.decisions:
        if d.storage >= len(graph.storages):
            _refuse("decisions", f"about storages 0 to {len(graph.storages) - 1}", f"one about storage {d.storage}")
    ops = {c.covered: c.op for c in graph.calls if c.covered >= 0}
    for c in plan.choices:
        if ops.get(c.covered) != c.op:
            _refuse(f"the choice for covered call {c.covered}", f"for {ops.get(c.covered, 'a call that exists')}", c.op)


def _check_modules(plan: Plan, graph: SavedGraph) -> None:
    if any(d.codec != "recompute" for d in plan.decisions):
        _refuse("decisions", "all of codec recompute, as modules run anew", "another")
    once = Counter(m.name for m in graph.modules)
    for name in plan.modules:
        if once[name] != 1:
            expected = f"module {name!r} to run once, on tensors and plain values alone"
            raise PlanMismatchError(expected, "another forward", AGAIN)


def _refuse(what: str, demand: str, got: str) -> None:
    raise PlanError(f"compress: plan is damaged: {what} must be {demand}, got {got}; {REMEDY}")


def check_rows(plan: Plan, args: tuple, kwargs: dict) -> None:
    """Raise PlanMismatchError for a forward of more rows than planned; fewer are fine."""
    planned = plan.contract.batch
    if not planned or (plan.budget_bytes is None and plan.sub_batches == 1):
        return
    most, rows = plan.planned_rows, batch_size((args, kwargs))
    if rows <= most:
        return
    parts = "" if plan.sub_batches == 1 else f" (a batch of {planned} in {plan.sub_batches} sub-batches)"
    remedy = f"plan for a batch of {rows}"
    if plan.sub_batches > 1:
        remedy = f"call gistkit.step(model, loss_fn, inputs, targets), which cuts the batch up, or {remedy}"
    raise PlanMismatchError(f"a forward of at most {most} rows{parts}", f"one of {rows} rows", remedy)


def _tensors(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def _by_extent(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A forward's arguments with fake tensors for views that begin within their storage, as all but the first of a
    batch's parts do: what is captured of such a view is the whole storage. One that shares it stays."""
    given = {id(t): t for t in _tensors(args, kwargs) if t.layout == torch.strided and not t.is_nested}
    there = Counter(t.untyped_storage()._cdata for t in given.values())
    made = {}
    with FakeTensorMode():
        for t in given.values():
            if type(t) is torch.Tensor and t.storage_offset() and there[t.untyped_storage()._cdata] == 1:
                fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
                fake.requires_grad_(t.requires_grad)
                made[id(t)] = fake if t.is_leaf else fake.clone()
    return tree_map_only(torch.Tensor, lambda t: made.get(id(t), t), (args, kwargs)) if made else (args, kwargs)


def check_capture(plan: Plan | None, ready: bool) -> None:
    """Raise PlanMismatchError where a forward is captured into a CUDA graph before one of its kind has run (``ready``),
    or under a plan with what a graph cannot hold: copies to the host, and sparse storages within a budget."""
    if not ready:
        expected = "a forward like one that has run: the first captures, plans and checks"
        raise PlanMismatchError(expected, "the capture of a CUDA graph", "run a few steps before the capture")
    away = [] if plan is None else [d for d in plan.decisions if d.on_host or (plan.budget and d.form.sparse)]
    if away:
        what = "sends to the host" if away[0].on_host else f"stores as {away[0].codec}, of a size that only a run tells"
        expected = f"a forward outside CUDA graphs, as the plan {what} storage {away[0].storage}"
        remedy = "plan with cuda_graph=True, or run the steps without a graph"
        raise PlanMismatchError(expected, "the capture of one", remedy)


def check_mode(plan: Plan, training: bool) -> None:
    """Raise PlanMismatchError for a plan with a budget in the mode that it was not made for."""
    if plan.budget_bytes is not None and training is not plan.contract.training:
        planned, now = ("evaluation", "training") if training else ("training", "evaluation")
        remedy = f"call model.{'eval' if training else 'train'}(), plan in this mode, or leave gradients off"
        raise PlanMismatchError(f"a forward in {planned} mode", f"one in {now} mode with gradients on", remedy)


def shapes(args: tuple, kwargs: dict) -> Shapes:
    """The shapes of all tensors among a call's arguments, in order."""
    return tuple(tuple(t.shape) for t in _tensors(args, kwargs))


def inputs_of(args: tuple, kwargs: dict) -> tuple[StateTensor, ...]:
    """The tensors among a call's arguments, as a plan's contract names them."""
    return tuple(
        StateTensor(f"input {i}", str(t.dtype).removeprefix("torch."), tuple(t.shape), t.requires_grad)
        for i, t in enumerate(_tensors(args, kwargs))
    )


_CALL_KINDS = {op: attrgetter("x.dtype", "x.shape", *names) for op, names in GEOMETRY.items()}
"""By covered op, with the strides, what :func:`check_call` depends on."""


def check_call(program: Program, index: int, bound: Bound) -> None:
    """Raise PlanMismatchError where a covered call has other strides and the like than planned, or a larger operand."""
    call, sizes = program.covered[index], program.plan.contract.storage_bytes
    kind = _CALL_KINDS[call.op](bound), bound.x.stride()
    if program.checked[index] == kind:
        return
    where = f"{call.op}{f' of {call.module!r}' if call.module else ''}, covered call {index},"
    for name in GEOMETRY[call.op]:
        now = getattr(bound, name)
        planned = (call.options or {}).get(name, now)
        if (tuple(planned) if isinstance(planned, list) else planned) != now:
            raise PlanMismatchError(f"{where} with {name}={planned}", f"{now}", AGAIN)
    if sizes and call.operands:
        most, nbytes = sizes[program.graph.values[call.operands[0]].storage], _extent_bytes(bound.x)
        if nbytes > most:
            raise PlanMismatchError(
                f"{where} of at most {most} bytes", f"an operand of {nbytes}", "plan for inputs of these sizes"
            )
    program.checked[index] = kind


def _extent_bytes(x: torch.Tensor) -> int:
    """From the first to the last element in memory: never more than the storage, whose bytes are what is planned."""
    if not x.numel():
        return 0
    return (1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def check_bytes(plan: Plan, graph: SavedGraph) -> None:
    """Raise PlanMismatchError where a forward saves more than the one that a budget was planned for."""
    most_bytes = plan.contract.saved_bytes or plan.plain_bytes
    if plan.budget_bytes is not None and most_bytes and graph.kept_bytes > most_bytes:
        given = " and ".join(str(s.shape) for s in graph.storages if s.kind == "input")
        raise PlanMismatchError(
            f"a forward that saves at most {most_bytes} bytes in plain PyTorch, for the plan's budget",
            f"one that saves {graph.kept_bytes}, of inputs of shape {given}",
            "plan for inputs of these sizes",
        )


def given_program(plan: Plan, model: torch.nn.Module, args: tuple, kwargs: dict) -> Program:
    """The plan compiled for a model's forward; PlanMismatchError where it is not the planned one.

    A plan is made from the CPU's operators wherever the model is, so these are captured first; one that was made from
    the device's own is known by its fingerprint."""
    args, kwargs = _by_extent(args, kwargs)
    found: list[SavedGraph] = []
    for on_cpu in (True, False):
        try:
            graph = capture(model, args, kwargs, on_cpu=on_cpu)
        except CaptureError as error:
            if found:
                break
            raise PlanMismatchError("a forward that can be captured, as for the plan", str(error), AGAIN) from error
        if graph.fingerprint == plan.fingerprint:
            _check_calls(plan, graph)
            if plan.modules:
                _check_modules(plan, graph)
            else:
                check_decisions(plan, graph)
            if plan.budget_bytes is not None:
                check_inputs(plan.contract, inputs_of(args, kwargs))
                check_state(plan.contract, graph.state, gradients=True)
                check_bytes(plan, graph)
                check_forward(plan.contract, graph)
            return Program(graph, plan, given=True)
        found.append(graph)
    check_state(plan.contract, found[0].state, gradients=False)
    check_same(plan.contract, found[0], inputs_of(args, kwargs), autocast_in_force())
    raise PlanMismatchError(
        f"a forward with fingerprint {plan.fingerprint}", f"one with fingerprint {found[0].fingerprint}", AGAIN
    )


def autocast_in_force() -> str:
    """Which autocast is on, in words."""
    states = zip(AUTOCAST_DEVICES, autocast_now(), strict=True)
    found = [f"{str(dtype).removeprefix('torch.')} on {device}" for device, (enabled, dtype) in states if enabled]
    return f"autocast to {' and '.join(found)}" if found else "no autocast"
