"""plan: from a model, a batch and a budget in bytes to the plan of a step that fits.

Capture, costs and a policy of :data:`gistkit.planning.policies.registry.POLICIES`, which the simulator judges. A plan
that does not fit is never returned: :class:`BudgetError` says what each class of moves needs at least.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gistkit.api.capturing import may_be_cut
from gistkit.api.measuring import Measure, captured, check_real, costs_of, with_times
from gistkit.capture import spread, uncollected
from gistkit.errors import BudgetError, CaptureError, renamed
from gistkit.formats import AUTO, MAX_ERROR, Lossy, named
from gistkit.ir import Plan, SavedGraph
from gistkit.planning import EXAMPLE_FORMAT, check_words, contract_of, refused, task_calls, with_joint_gradients
from gistkit.planning import made as by_name
from gistkit.planning.cost import CostTable, Hardware, check_budget, parse_budget, parse_bytes
from gistkit.planning.forms import Replays
from gistkit.planning.policies import POLICIES
from gistkit.planning.simulate import Simulator, check_per_sub_batch_norm
from gistkit.profiling import all_tensors
from gistkit.runtime import TrialSteps, assigned, autocast_in_force, check_max_error, inputs_of

GRAPH_PAYS = 0.9
"""A CUDA graph is named where a step takes at most this share of its time in one."""


@renamed(reserve="reserved_bytes=", batch_statistics="per_sub_batch_norm=True")
def plan(
    model: torch.nn.Module,
    *batch: Any,
    budget: int | str | None = None,
    policy: str = "optimal",
    fidelity: str = "bitwise",
    lossy: str | bool | None = None,
    max_error: float = MAX_ERROR,
    hardware: Hardware | str | Path | None = None,
    density: float | Mapping[int, float] | None = None,
    reserved_bytes: int | str = 0,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    measure: Measure = None,
    per_sub_batch_norm: bool = False,
    cuda_graph: bool = False,
    hold_output: bool = True,
) -> Plan:
    """Plans one training step (forward and backward) that fits ``budget`` and takes the least time.

    Example::

        plan = gistkit.plan(model, images, labels, loss_fn=F.cross_entropy, budget="12GiB")
        gistkit.compress(model, plan)
        loss = gistkit.step(model, F.cross_entropy, images, labels)

    ``model``, ``batch``: real, fake or on the meta device; they may be larger than this machine, as nothing is
    computed but what ``measure`` says. With ``loss_fn`` the first item of the batch is the model's input (a tuple:
    several positional ones, a dict: named ones) and the rest go to the loss: ``loss_fn(model(batch[0]), *batch[1:])``.
    Without it the step is ``model(*batch)`` and backward from what that returns.

    ``budget``: bytes, ``"12GiB"``, ``"800MB"``, or ``"60%"`` of what plain PyTorch needs; None sets no limit. It counts
    everything on the device during forward and backward: parameters, buffers, gradients, inputs, activations, payloads,
    decoded copies, workspace and what the device's libraries hold (``Hardware.libraries_bytes``). ``reserved_bytes``
    adds what the planner cannot see, such as an optimiser's state.

    The step begins with ``.grad`` None. One that adds to earlier gradients, or zeros them in place, needs the bytes of
    the trainable parameters as ``reserved_bytes``; plans of several sub-batches have them in. The step is one forward
    with the planned loss and then its backward. Where a second forward begins before that, or backward retains the
    graph, a :class:`gistkit.BudgetWarning` says so once a model; plan a module whose forward does all of it.

    ``policy``: ``optimal``, ``blocks`` (whole modules run anew), or one of the papers': ``plain``, ``gist``,
    ``vdnn-all``, ``vdnn-conv``, ``vdnn-dyn``, ``vdnn+``, ``modnn``, ``cdma``, ``checkpoint``. ``fidelity``: the class
    of moves, ``bitwise`` or ``reassociated`` (sums in another order: sub-batches; convolutions by engines of cuDNN,
    where the tasks are measured and the extra ``cudnn`` is installed). ``lossy``: a narrow format such as ``"fp8"``, or
    True for ``"int4s"``, which implies the class ``lossy``; ``"auto"``: a format for each storage, or none, that keep
    the fewest bytes with a relative error of the gradients of at most ``max_error`` (0.04), by the variance model of
    :mod:`gistkit.runtime.assign`. Some four steps a storage run for that now, on copies of the model, which must be
    real; each storage is exact or in its format in the plan, and ``details["auto"]`` holds the model, the error
    expected and measured, and the steps. ``hardware``: a preset (``h100-sxm``, ``rtx4090``, ``cpu``, ...), a file of
    ``gistkit calibrate`` or a Hardware. None is the device that the model is on: a CUDA card by its calibration on this
    machine or its preset; one without either is measured now, once, for a few seconds. ``prediction.rates`` names the
    source. ``density``: the share of elements that are not zero in what may hold zeros, one number or by storage id
    (default: by the operator that made it). ``per_sub_batch_norm=True``: accepts sub-batches though batch norms in
    training mode then see the statistics of each part; False: such a network is not cut. ``cuda_graph=True``: the step
    will be a CUDA graph (:class:`gistkit.GraphedStep`), so the host's time does not count, nothing is sent to the host,
    kept in a form whose size only a run tells or rerun where that draws random numbers (dropout), and the graph's copy
    of the batch and 64 MiB for the libraries are reserved. ``hold_output=False``: the step lets go of the model's
    output when the loss is there, as :func:`gistkit.step` and a CUDA graph do; of GPT-2's 8,157 MiB (8 x 1,024 tokens,
    bf16) its logits are 786. A loop that holds the output (``out = model(x)``) takes its bytes beyond such a plan.

    ``measure``: where the tasks' seconds and the workspace of convolutions come from. True: a few plain steps that run
    now, on a copy of the model, which must be real, and on fewer rows where the batch does not fit. False: arithmetic
    and bytes by the hardware's rates. None: True where model and batch are on one CUDA card and ``hardware`` names no
    other, else False. A path, or what :func:`gistkit.measure` returned: times measured before, of this very step.

    Returns a :class:`gistkit.Plan`. ``peak_bytes`` is the peak, ``step_s`` the seconds of the step with the host's
    share and transfers beside the computation. ``optimal`` is never slower than another policy that fits and is of the
    class, except those in ``prediction.not_compared``, for which there was no time; it is weighed against ``plain`` and
    ``blocks``, PyTorch's own operators, for a host that takes 1.5 times as long as measured. ``contract`` says what the
    plan was made for, ``details["workspace"]``, where the tasks are measured, how much of the convolutions' workspace
    channels_last would save, ``details["host"]`` what a CUDA graph would gain where the host sets the pace.

    Raises :class:`gistkit.BudgetError` where nothing allowed fits, with ``least_bytes`` by class;
    :class:`gistkit.CaptureError` where the step cannot be captured or, under a budget, its bytes cannot be known
    (recurrent layers); :class:`gistkit.PlanError` for a policy that needs a link on hardware without one, or in a CUDA
    graph; :class:`gistkit.MeasureError` where the step cannot be measured; ValueError or TypeError for arguments that
    make no sense, a scripted, traced or compiled model among them.
    """
    lossy = named(lossy)
    auto = lossy == AUTO
    allowed = check_words(policy, fidelity, EXAMPLE_FORMAT if auto else lossy, density)
    check_max_error("plan", max_error)
    if auto:
        check_real("plan", model, batch, 'or name a format: lossy="fp8s"')
    check_budget(budget)
    parse_bytes(reserved_bytes)
    check_per_sub_batch_norm("plan", per_sub_batch_norm)
    if not isinstance(hold_output, bool):
        raise TypeError(f"plan: hold_output must be True or False, got {hold_output!r}; False is for gistkit.step")
    held = hold_output and not cuda_graph

    def cut(graph: SavedGraph) -> bool:
        return (budget is not None or allowed != "bitwise") and may_be_cut(graph, per_sub_batch_norm)

    engines = allowed != "bitwise"
    graph, device, times = captured("plan", model, batch, loss_fn, hardware, measure, cut, held, engines)
    costs, reserve_bytes = costs_of(graph, device, times, density), parse_bytes(reserved_bytes)
    if cuda_graph:
        budget = parse_budget(budget, POLICIES["plain"](graph, costs).peak_bytes + reserve_bytes)
        costs = costs.in_cuda_graph()
        reserve_bytes += sum(t.nbytes for t in all_tensors(batch))
    settings = {"reserved_bytes": reserve_bytes, "per_sub_batch_norm": per_sub_batch_norm}
    given, targets = (spread(batch[0]), batch[1:]) if loss_fn is not None else ((batch, {}), ())
    narrow: Lossy = lossy
    details: dict[str, Any] = {}
    if auto:
        found = assigned(graph, TrialSteps(model, given, targets, loss_fn), max_error, costs.densities)
        narrow, details = found.formats, found.details()
    remedy = "" if times is None else times.workspace_remedy
    details |= {"workspace": remedy} if remedy else {}
    try:
        made = plan_graph(graph, costs, budget=budget, policy=policy, fidelity=fidelity, lossy=narrow, **settings)
    except BudgetError as error:
        if not remedy:
            raise
        raise BudgetError(error.budget_bytes, error.least_bytes, f"{error.remedy}; {remedy}") from None
    waits = host_remedy(graph, costs, made) or cache_remedy(model, graph, made)
    details |= {"host": waits} if waits else {}
    made, inputs = replace(made, details={**made.details, **details}), inputs_of(*given)
    contract = replace(made.contract, inputs=inputs, autocast=autocast_in_force())
    return with_times(replace(made, contract=contract), times)


@uncollected()
def plan_graph(
    graph: SavedGraph,
    costs: CostTable,
    *,
    budget: int | str | None = None,
    policy: str = "optimal",
    fidelity: str = "bitwise",
    lossy: Lossy = None,
    reserved_bytes: int | str = 0,
    per_sub_batch_norm: bool = False,
    refuse: bool = True,
) -> Plan:
    """:func:`plan` of a step that is captured already (with its tasks), on given costs. Errors as there.

    With ``refuse`` False a policy that aims at no budget may exceed it, and others refuse it in their own words.
    """
    allowed = check_words(policy, fidelity, lossy)
    reserve_bytes = parse_bytes(reserved_bytes)
    plain = POLICIES["plain"](graph, costs)
    plain_peak_bytes = plain.peak_bytes + reserve_bytes
    budget_bytes = parse_budget(budget, plain_peak_bytes)
    settings = {"fidelity": allowed, "lossy": lossy, "reserve": reserve_bytes, "batch_norm": per_sub_batch_norm}
    usable = costs.without_engines() if allowed == "bitwise" else costs
    if budget_bytes is not None:
        _demand_known_bytes(graph, costs.hardware)
    try:
        made = by_name(policy, graph, usable, budget_bytes, settings)
    except BudgetError as error:
        if not refuse or budget_bytes is None:  # modnn: the device's memory is its limit
            raise
        raise refused(graph, costs, budget_bytes, settings, policy, error) from None
    if refuse and budget_bytes is not None and made.peak_bytes > budget_bytes:
        raise refused(graph, costs, budget_bytes, settings, policy, made)
    made = with_joint_gradients(graph, costs, made)
    sparse = [d.storage for d in made.decisions if d.form.sparse]
    contract = replace(
        contract_of(graph, made.sub_batches),
        densities={s: costs.densities[s] for s in sparse if s in costs.densities},
        has_link=costs.hardware.has_link,
        fidelity=allowed,
        lossy=AUTO if isinstance(lossy, Mapping) else lossy,
        reserved_bytes=reserve_bytes,
        per_sub_batch_norm=per_sub_batch_norm,
        **(task_calls(graph) if any(d.on_host for d in made.decisions) else {}),
    )
    rates = costs.hardware.source or f"given as {costs.hardware.name}"
    plain_figures = {"plain_peak_bytes": plain_peak_bytes, "plain_step_s": plain.step_s}
    prediction = replace(made.prediction, rates=rates, **plain_figures)
    return replace(made, budget_bytes=budget_bytes, contract=contract, prediction=prediction)


def host_remedy(graph: SavedGraph, costs: CostTable, made: Plan) -> str:
    """What a plan's step gains as a CUDA graph, where the host sets its pace and a graph can hold it; else ''."""
    if costs.captured or not costs.hardware.async_counts or any(d.on_host or d.form.sparse for d in made.decisions):
        return ""
    if len(Replays(graph, captured=True).able(made.decisions)) < len(made.decisions):
        return ""
    seconds = Simulator(graph, costs.in_cuda_graph()).run(made).step_s
    if seconds > GRAPH_PAYS * made.step_s:
        return ""
    instead = f"{1e3 * seconds:.1f} ms, not {1e3 * made.step_s:.1f}"
    return (
        f"the host sets the pace: as a CUDA graph the step would take {instead}; plan with cuda_graph=True, and run "
        "gistkit.GraphedStep"
    )


def cache_remedy(model: torch.nn.Module, graph: SavedGraph, made: Plan) -> str:
    """What keeps the parts of a model of transformers from running anew as a whole, where some calls do; else ''."""
    caches = any(getattr(getattr(part, "config", None), "use_cache", False) is True for part in model.modules())
    plainly = {m.name for m in graph.modules}  # that were given no more than tensors and plain values
    filled = caches and any(c.module not in plainly for c in graph.calls if c.module)
    if made.modules or not filled or all(d.codec != "recompute" for d in made.decisions):
        return ""
    return (
        "the model's blocks fill a cache of keys and values, so none can run anew as a whole, which takes the host "
        "least: set model.config.use_cache = False and plan again"
    )


RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Ops that cuDNN runs with a reserve, and oneDNN (an LSTM alone) with a workspace, of sizes that it tells when it runs:
a fake tensor has none of its bytes."""


def _demand_known_bytes(graph: SavedGraph, device: Hardware) -> None:
    """CaptureError where a call keeps bytes that no capture tells: no budget could be promised."""
    for call in graph.calls:
        by_cudnn = device.async_counts and call.op in RECURRENT
        if by_cudnn or any(save.node.startswith("MkldnnRnn") for save in call.saves):
            where = f" of {call.module!r}" if call.module else ""
            raise CaptureError(
                f"a budget counts every byte, and how many {call.op}{where} (call {call.index}) keeps for backward "
                "only the library that runs it knows; plan without a budget, or without this part"
            )
