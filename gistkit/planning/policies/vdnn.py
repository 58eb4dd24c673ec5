"""vDNN's policies (Rhu et al., MICRO 2016): feature maps wait in host memory between their two uses. cDMA (Rhu et al.,
HPCA 2018) is vDNN's schedule with transfers compressed by zero-value compression.

The static ones, sections III-A and III-B, rule by rule:

- Only layers of the feature extraction part are managed (III, IV-A); the classifier is left as it is.
- A layer offloads its X only where it is X's last consumer in forward (the reference counts of Fig. 3) and does not
  write it: activations run in place, use Y and dY alone, and never offload.
- vDNN_all offloads the X of every such layer, vDNN_conv that of CONV layers. An X that a CONV and, after it, a POOL
  read stays with vDNN_conv.
- The transfer overlaps the layer's own forward; the next layer waits for it, and X's memory is free before it begins.
- An X without a use in backward is freed without a transfer.
- Before each managed layer's backward, :func:`find_prefetch_layer` picks the layer whose X is fetched meanwhile; it is
  there before the next layer's backward begins.
- The classifier does not search, so the last managed layer's X comes on demand.

On a library's view (:mod:`bench.papers.library_view`) this is the paper's setting. On a captured step the X of a POOL
has no use in backward, and the batch belongs to the caller and stays.

vDNN_dyn (III-C) finds the offloaded layers and the algorithms by trial passes, which are simulations here:

1. vDNN_all with memory-optimal algorithms: whether the network can be trained at all.
2. The fastest algorithms, without offloading; else with vDNN_conv; else with vDNN_all. The first that fits is taken.
3. Greedy: with vDNN_conv, then with vDNN_all, every layer starts at its fastest algorithm and is downgraded, by itself,
   until its tasks fit, down to the memory-optimal one. Workspace is the only memory that an algorithm changes, and only
   while its own tasks run. If neither fits, phase 1's configuration.

vDNN+ (Chen et al., DATE 2018, section V-B) is moDNN's own comparison: the sub-batch size comes from moDNN's eq. (3), at
that size vDNN_dyn chooses. vDNN keeps more than that equation counts (whatever it does not offload): where its best
does not fit, the next smaller sub-batch is tried, down to one sample.

cDMA packs a window of 32 elements into a 32-bit mask and the non-zeros: at density d 32 / (1 + 32 d) times less for
fp32. The paper's engine beside the memory controllers does that for free (:mod:`bench.papers.cdma`); here the device's
own kernels do, and their time counts. So each X is compressed or not, whichever adds less time (CSWAP, 2021): its own
forward hides the way out, the layer that fetches it hides the way back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from gistkit.ir import ACTV, CONV, FORWARD, KERNEL_DTYPES, Block, Decision, Layer, Plan, SavedGraph, layers, scaled
from gistkit.planning.cost import CostTable, of_part
from gistkit.planning.forms import capacity, make_plan, own_decisions
from gistkit.planning.policies.convolutions import MEMORY, PERFORMANCE, ConvAlgorithms
from gistkit.planning.policies.modnn.modnn import in_parts
from gistkit.planning.policies.modnn.sub_batch import choose_sub_batch, most_parts, splits
from gistkit.planning.simulate import scaled_costs, simulate

ALL, CONVS, NONE = "all", "conv", "none"


def vdnn(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None = None,
    *,
    offload: str = ALL,
    algorithms: str | Mapping[int, str] = MEMORY,
) -> Plan:
    """vDNN_all or vDNN_conv (``offload``: ``all``, ``conv``, ``none``) with memory- or performance-optimal convolutions
    (``algorithms``: ``m``, ``p`` or names by call)."""
    convolutions = ConvAlgorithms(graph, costs)
    decisions = (*own_decisions(graph), *offloads(graph, offload))
    choices = convolutions.choices(convolutions.of(algorithms))
    details = {"offload": offload, "algorithms": algorithms if isinstance(algorithms, str) else "by layer"}
    name = "vdnn" if offload == NONE else f"vdnn-{offload}"
    return make_plan(name, graph, costs, budget_bytes, decisions, choices, details=details)


vdnn_all = partial(vdnn, offload=ALL)
vdnn_conv = partial(vdnn, offload=CONVS)


def vdnn_dyn(graph: SavedGraph, costs: CostTable, budget_bytes: int | None = None) -> Plan:
    """vDNN_dyn within a budget (None: the device's memory). ``details["phase"]`` ended the search. Where even phase 1
    overflows, its plan has ``details["trainable"]`` False."""
    limit_bytes = capacity(costs, budget_bytes)
    phase, plan = 1, vdnn(graph, costs, budget_bytes, offload=ALL, algorithms=MEMORY)
    if plan.peak_bytes <= limit_bytes:
        for phase, offload in ((2, NONE), (2, CONVS), (2, ALL), (3, CONVS), (3, ALL)):
            names = PERFORMANCE if phase == 2 else _downgraded(graph, costs, limit_bytes, offload)
            plan = vdnn(graph, costs, budget_bytes, offload=offload, algorithms=names)
            if plan.peak_bytes <= limit_bytes:
                break
    return replace(plan, policy="vdnn-dyn", details={**plan.details, "phase": phase})


def _downgraded(graph: SavedGraph, costs: CostTable, limit_bytes: int, offload: str) -> dict[int, str]:
    """Phase 3's algorithm of each convolution: the fastest under which its own tasks fit, else the memory-optimal."""
    convolutions = ConvAlgorithms(graph, costs)
    chosen = convolutions.memory_optimal()
    base = vdnn(graph, costs, limit_bytes, offload=offload, algorithms=chosen)
    free = [limit_bytes - used for used in simulate(graph, base, costs).memory_bytes]
    for call, tasks in convolutions.tasks.items():
        room = {t: free[t] + convolutions.task_workspace(t, chosen[call]) for t in tasks}
        fits = (n for n in convolutions.names(call) if all(convolutions.task_workspace(t, n) <= room[t] for t in tasks))
        chosen[call] = next(fits, chosen[call])
    return chosen


def vdnn_plus(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None = None,
    *,
    fidelity: str = "reassociated",
    reserve: int = 0,
    batch_norm: bool = False,
) -> Plan:
    """vDNN_dyn in sub-batches within a budget (None: the device's memory), ``reserve`` bytes of which are left free. As
    with vDNN, a network that does not fit one sample at a time gets the last plan tried, ``details["trainable"]``
    False; below moDNN's lower bound, vDNN's too, a BudgetError is raised. ``fidelity`` "bitwise" allows no sub-batches,
    ``batch_norm`` accepts them for batch norms, as in moDNN."""
    memory_bytes, batch = capacity(costs, budget_bytes), max(graph.batch, 1)
    words = {"fidelity": fidelity, "reserve": reserve}
    first = choose_sub_batch(graph, costs, memory_bytes, batch_norm=batch_norm, **words)[0].parts
    most = 1 if fidelity == "bitwise" else most_parts(graph, batch_norm)
    newest = max((b.nbytes for b in graph.blocks if b.kind == "weight_gradient"), default=0)
    plan = None
    for parts in splits(batch, first, most):
        one = scaled(graph, parts)
        table = costs if parts == 1 else scaled_costs(costs, graph, one)
        beside = newest if parts > 1 else 0  # while gradients accumulate, a new one lies beside its sum
        plan = vdnn_dyn(one, table, memory_bytes - reserve - beside)
        plan = replace(plan, policy="vdnn+", details={**plan.details, "sub_batch": -(-batch // parts)})
        plan = in_parts(plan, graph, costs, budget_bytes, parts, reserve)
        if plan.details["trainable"]:
            break
    assert plan is not None
    return plan


def offloads(graph: SavedGraph, which: str) -> tuple[Decision, ...]:
    """What vDNN_all (``all``), vDNN_conv (``conv``) or nobody (``none``) offloads, and when it comes back."""
    managed = [layer for layer in layers(graph) if layer.features and layer.backward]
    offloaded = _offloaded(graph, managed, which)
    fetched_during = prefetches([layer.kind for layer in managed], offloaded)
    found = []
    for position, blocks in sorted(offloaded.items()):
        during = managed[fetched_during[position]].backward if position in fetched_during else ()
        found += [_offload(block, managed[position], during) for block in blocks]
    return tuple(found)


def _offloaded(graph: SavedGraph, managed: list[Layer], which: str) -> dict[int, list[Block]]:
    last_reader: dict[int, int] = {}
    for task in graph.tasks:
        if task.phase == FORWARD:
            last_reader.update(dict.fromkeys((*task.reads, *task.writes), task.index))
    found: dict[int, list[Block]] = defaultdict(list)
    for position, layer in enumerate(managed):
        if layer.kind == ACTV or which == NONE or (which == CONVS and layer.kind != CONV):
            continue
        for block in (graph.blocks[b] for b in layer.x if b not in layer.y):
            used = block.uses and block.storage >= 0 and block.last < len(graph.tasks)
            if used and last_reader[block.id] == layer.forward:
                found[position].append(block)
    return found


def _offload(block: Block, owner: Layer, during: Sequence[int]) -> Decision:
    """A block's offload by its layer; it is fetched ``during`` these backward tasks of another, on demand if none."""
    use = block.uses[0].task
    start, end = (during[0], during[-1] + 1) if during else (use, use)
    return Decision(
        block.storage,
        "dense",
        place="host",
        offload=owner.forward,
        release=max(block.last, block.saved, owner.forward) + 1,
        prefetch=min(start, use),
        ready=min(end, use),
        reason="waits on the host between its two uses",
    )


def find_prefetch_layer(kinds: Sequence[str], waiting: Collection[int], current: int) -> int:
    """The layer whose X is fetched while layer ``current`` runs backward, -1 where there is none (Fig. 10). The nearest
    preceding layer that is ``waiting``: offloaded and not prefetched yet. The search ends at the next CONV that is no
    hit, so that nothing comes back long before it is used. (The paper tests behind the loop.)"""
    for layer in range(current - 1, -1, -1):
        if layer in waiting:
            return layer
        if kinds[layer] == CONV:
            break
    return -1


def prefetches(kinds: Sequence[str], offloaded: Collection[int]) -> dict[int, int]:
    """For each offloaded layer the layer during whose backward its X comes back, all layers run in reverse. A layer
    that nobody prefetched before its own backward begins is missing: its X is copied on demand."""
    waiting, fetched_during = set(offloaded), {}
    for current in range(len(kinds) - 1, -1, -1):
        hit = find_prefetch_layer(kinds, waiting, current)
        if hit >= 0:
            waiting.discard(hit)
            fetched_during[hit] = current
    return fetched_during


CODEC = "zvc"


def cdma(graph: SavedGraph, costs: CostTable, budget_bytes: int | None = None) -> Plan:
    """vDNN_all's schedule (:func:`gistkit.planning.policies.vdnn.vdnn`) under performance-optimal convolutions, with
    compressed transfers where they pay."""
    convolutions = ConvAlgorithms(graph, costs)
    by_call = convolutions.performance_optimal()
    names = {t: of_part(by_call[call], convolutions.part[t]) for call in by_call for t in convolutions.tasks[call]}
    blocks = {b.storage: b for b in graph.blocks}
    sent = (_packed(blocks[raw.storage], costs, names, raw) for raw in offloads(graph, ALL))
    decisions, choices = (*own_decisions(graph), *sent), convolutions.choices(by_call)
    return make_plan("cdma", graph, costs, budget_bytes, decisions, choices)


def _packed(block: Block, costs: CostTable, names: Mapping[int, str], raw: Decision) -> Decision:
    density = costs.densities.get(block.storage)
    if density is None or block.dtype not in KERNEL_DTYPES:
        return raw
    out_s = sum(costs.task_s(t, names.get(t, "")) for t in range(raw.offload, raw.release))
    back_s = sum(costs.task_s(t, names.get(t, "")) for t in range(raw.prefetch, raw.ready))
    if round_trip_s(block, costs, density, out_s, back_s) < round_trip_s(block, costs, None, out_s, back_s):
        return replace(raw, codec=CODEC, reason=f"{1 - density:.0%} zeros need not cross the link")
    return raw


def round_trip_s(block: Block, costs: CostTable, density: float | None, out_s: float, back_s: float) -> float:
    """Seconds that a block's way to the host and back adds to the step: encoding, decoding, and what ``out_s`` and
    ``back_s`` of compute do not hide of the transfers. ``density`` None: uncompressed."""
    if density is None:
        return max(0.0, costs.d2h_s(block.nbytes) - out_s) + max(0.0, costs.h2d_s(block.nbytes) - back_s)
    payload = costs.payload_bytes(CODEC, block.nbytes, block.dtype, density)
    extra = costs.encode_s(CODEC, block.nbytes, block.dtype, density)
    extra += sum(costs.decode_s(CODEC, block.nbytes, block.dtype, density) for use in block.uses if use.values)
    return extra + max(0.0, costs.d2h_s(payload) - out_s) + max(0.0, costs.h2d_s(payload) - back_s)
