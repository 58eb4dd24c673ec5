"""The state of one forward, from its first to its last covered call: how its tensors are kept, what was found out about
them. With a program (a compiled plan) every covered call has its decisions; without one, or after the forward left its
plan, decisions follow from the tensor alone (:func:`gistkit.runtime.program.program.ad_hoc`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gistkit.capture import is_weight
from gistkit.codecs import CODECS, Encoded, Sparse
from gistkit.errors import HostMemoryError, PlanError, PlanMismatchError
from gistkit.ir import FORMS, RERUN, STAY, Decision
from gistkit.kernels import capturing
from gistkit.nn.eligible import KERNEL_DTYPES
from gistkit.nn.keep import PACKED, Kept, SavedAsIs
from gistkit.runtime.forward.deferred_mask import DeferredMask
from gistkit.runtime.forward.journey import Journey
from gistkit.runtime.offload.host import AwayOnHost, HostBody
from gistkit.runtime.program.joint_gradients import JOINT_BYTES, JOINT_SHARE
from gistkit.runtime.program.program import KEEP_DENSE, WITHOUT_VALUES, Program, Settings, ad_hoc
from gistkit.runtime.rebuild.terms import NormSource
from gistkit.runtime.recompute.tape import Tape
from gistkit.runtime.sparse_sizes.exact import ExactPacker, Forecasts
from gistkit.runtime.stash.stash import Body, CodedBody, Reader, SettledBody, Stash, StashTable, covers, whole

PAYS = 0.95
DENSE = "too dense for sparse storage to pay"
IN_GRAPH = "in a CUDA graph, where a sparse storage has no size that the host knows"
AGAIN = "a segment that runs anew in backward starts from it"
HELD = replace(
    KEEP_DENSE, reason="kept for a call that runs anew, which reads another tensor than the plan's graph says"
)


class DenseStorage(NamedTuple):
    """One storage that stays as it is: weak identity, bytes, planned id (-1: none), reason."""

    ref: StorageWeakRef
    nbytes: int
    storage: int
    reason: str


@dataclass
class ForwardState:
    """The state of one forward; cleared when it ends, so that only backward nodes hold on to anything. ``strict``: the
    plan is the caller's; ``bound``: and promises a budget; ``journey``: what goes to the host, if the plan sends
    anything there. ``forecasts``: what earlier steps say of the storages' densities. ``calls`` is the number of the
    covered call that comes next, ``seen`` how many came by, of ``expected`` ones (None: all of the program's);
    ``instead`` is the covered call in whose place PyTorch's own op runs (-1: none). ``norms``: the batch norms that ran
    under the plan, by covered call. ``hooked``: its saved-tensor hooks are on all the time. ``nodes``: by planned
    storage the backward node that made it, for recipes. For the report: ``densities`` measured and ``notes``, by
    planned storage; ``dense``: what stays as it is, by the address of its storage; ``own``: (covered call, op, hold) of
    what a node keeps besides storages: masks, maps. ``masks``: addresses of those held in place of planned ones."""

    settings: Settings
    packer: ExactPacker
    program: Program | None = None
    strict: bool = False
    verified: dict = field(default_factory=dict)
    bound: bool = False
    journey: Journey | None = None
    forecasts: Forecasts | None = None
    probing: bool = False
    table: StashTable = field(default_factory=StashTable)
    norms: dict[int, NormSource] = field(default_factory=dict)
    nodes: dict[int, Any] = field(default_factory=dict)
    aliases: dict[int, Kept] = field(default_factory=dict)
    calls: int = 0
    seen: int = 0
    expected: int | None = None
    instead: int = -1
    unread: bool = False
    hooked: bool = False
    met: set[int] = field(default_factory=set)
    diverged: str = ""
    deferred: tuple[torch.Tensor, DeferredMask] | None = None
    tape: Tape | None = None
    densities: dict[int, float] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    dense: dict[int, DenseStorage] = field(default_factory=dict)
    own: list[tuple[int, str, Any]] = field(default_factory=list)
    masks: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        again = None if self.program is None else self.program.again
        if again is not None:
            # as with rebuilds: what starts from rounded values does not give the forward's bits
            verified = None if self.settings.lossy is not None else self.verified
            recordings = self.program.recordings  # type: ignore[union-attr]
            self.tape = Tape(again, self._outside, verified, self._not_again, self._other_operand, recordings)

    def diverge(self, expected: str, got: str) -> None:
        """The forward left its plan: an error where the caller gave the plan, else go on without it."""
        if self.strict:
            remedy = "plan this model again, or call gistkit.compress(model) without a plan"
            raise PlanMismatchError(expected, got, remedy)
        self.diverged = f"expected {expected}, got {got}"
        self.program = None

    def has_room(self, call: int, x: torch.Tensor) -> bool:
        """Whether PyTorch's own node may hold x decoded beside both gradients
        (:mod:`gistkit.runtime.program.joint_gradients`); never under a plan of the caller's, which counts less."""
        if self.strict or self.tape is not None:
            return False
        nbytes, program = x.numel() * x.element_size(), self.program
        if program is None:
            return nbytes <= JOINT_BYTES
        small_bytes = min(JOINT_BYTES, int(JOINT_SHARE * program.plan.kept_bytes))
        return nbytes <= small_bytes or call in program.roomy_calls

    def mark_sparse(self, y: torch.Tensor) -> None:
        """Remember that y is worth zero-value compression (a ReLU's output, or a pool's or dropout's after one)."""
        if self.program is None or self.probing:
            self.table.tag(y)

    def carrier(self, x: Any) -> DeferredMask | None:
        """The deferred mask of x, which a max-pool reads now; any other is stored."""
        pending, self.deferred = self.deferred, None
        if pending is None:
            return None
        y, mask = pending
        if x is y:
            return mask
        mask.store(y)
        return None

    def store_deferred(self) -> None:
        if self.deferred is not None:
            self.carrier(None)

    def stays_as_it_is(self, x: torch.Tensor, decision: Decision | None) -> bool:
        """Whether PyTorch's own hold on x is enough: nothing stands for it, and the report has it from the capture."""
        if decision is None or self.program is None or self.probing or decision.storage not in self.program.settled:
            return False
        return self.table.find(x) is None

    def keep(self, x: torch.Tensor, decision: Decision | None) -> Kept:
        """A hold on x for one backward node: the stash that exists, else a new one as decided, else x itself."""
        stash = self.table.find(x)
        if stash is not None:
            return Reader(stash, x)
        if decision is None:
            # a plan of the caller's counts what it leaves open, or what a branch without a backward saves, as it is
            decision = KEEP_DENSE if self.strict else ad_hoc(x, self.table.tagged(x), self.settings)
        elif decision.form in WITHOUT_VALUES:
            self.cannot(decision, "a backward needs its values")
            rounds = self.program is None or self.program.bears_rounding(decision.storage)
            settings = self.settings if rounds else replace(self.settings, lossy=None)
            other = KEEP_DENSE if self.strict else ad_hoc(x, self.table.tagged(x), settings)
            decision = replace(other, storage=decision.storage)
        made = self.encode(x, decision)
        return self.alias(x, decision) if made is None else Reader(made, x)

    def keep_exact(self, x: torch.Tensor) -> Kept:
        """A hold on x for a node that no plan speaks of, which may not bear rounded values."""
        stash = self.table.find(x)
        if stash is None:
            return self.keep(x, ad_hoc(x, self.table.tagged(x), replace(self.settings, lossy=None)))
        planned = stash.storage >= 0 and self.program is not None  # for all of its readers
        form = FORMS[stash.codec]
        exact = planned or not (form.rounds_to or form in WITHOUT_VALUES or form.returns == RERUN)
        return self.keep(x, None) if exact else self.alias(x, KEEP_DENSE)

    def encode(self, x: torch.Tensor, decision: Decision) -> Stash | None:
        """Stash x's storage under the decision's codec; None (and a note) where that is impossible or does not pay."""
        form = decision.form
        if decision.stays:
            return None
        if form.returns == RERUN:
            body = "its forward is not written down" if self.tape is None else self.tape.body(x, decision)
            if isinstance(body, str):
                self.cannot(decision, body)
                return None
            return self.stash(x, body, decision)
        if form in WITHOUT_VALUES:  # what reads a stash wants values
            self.cannot(decision, "a backward needs its values")
            return None
        if decision.codec not in CODECS:
            return None
        if form.returns == STAY:
            sent = self._sent(x, CODECS[decision.codec].encode(whole(x.detach())), decision)
            return None if sent is None else self.stash(x, sent, decision)
        body = self.body(x, decision)
        if body is None:
            return self.encode(x, replace(decision, codec="dense")) if decision.on_host else None
        return self.stash(x, body, decision)

    def body(self, x: torch.Tensor, decision: Decision) -> Body | None:
        """x under the decision's codec; None (and a note) where that is impossible or does not pay."""
        codec, to_host = CODECS[decision.codec], decision.on_host
        why = "a view of a part of a storage" if not covers(x) else codec.accepts(x)
        if why:
            self.cannot(decision, why)
            return None
        x = x.detach()
        # a plan of the caller's counts on what little it saves
        pays_bytes = (1.0 if self.strict else PAYS) * x.numel() * x.element_size()
        if to_host:
            encoded = self.packer.encode_for_host(codec, x)
        else:
            known = self.forecasts is not None and decision.storage >= 0
            forecast = self.forecasts.of(decision.storage) if known else None  # type: ignore[union-attr]
            encoded = self.packer.encode(codec, x, forecast, pays_bytes)
        if encoded is not None and encoded.nonzeros is not None and decision.storage >= 0:
            self.densities[decision.storage] = encoded.nonzeros / max(encoded.numel, 1)
        if encoded is None or (not encoded.pending and encoded.nbytes > pays_bytes):
            self.notes[decision.storage] = IN_GRAPH if encoded is None and capturing() else DENSE
            return None
        if to_host:
            return self._sent(x, encoded, decision)
        costly = self.bound and encoded.pending and isinstance(codec, Sparse) and not codec.decodes_scratch
        return SettledBody(encoded, self.packer.settle) if costly else CodedBody(encoded)

    def _sent(self, x: torch.Tensor, encoded: Encoded, decision: Decision) -> HostBody | None:
        """An encoding of x on its way to the host; None (and a note) where the host has no memory for it."""
        journey: Any = self.journey
        try:
            return HostBody(journey.put(decision.storage, encoded, x.device))
        except HostMemoryError as error:
            self.cannot(decision, str(error))
            return None

    def away(self, kept: Any, device: torch.device, decision: Decision) -> Any:
        """What a node keeps for itself, on the host until it runs; as it is (and a note) without memory there."""
        journey: Any = self.journey
        try:
            return AwayOnHost(kept, lambda what: journey.put(decision.storage, what, device))
        except HostMemoryError as error:
            self.cannot(decision, str(error))
            return kept

    def _outside(self, x: torch.Tensor, storage: int) -> Kept:
        if storage < 0 and x.layout == torch.strided and not x.is_nested:
            return self.alias(x, HELD)
        if self.program is None or storage < 0 or self.program.graph.storages[storage].kind != "activation":
            return SavedAsIs(x)
        return self.keep(x, self.program.decisions.get(storage) or replace(KEEP_DENSE, storage=storage, reason=AGAIN))

    def _not_again(self, storage: int, why: str) -> None:
        decision = None if self.program is None else self.program.decisions.get(storage)
        if decision is not None:
            self.cannot(decision, why)

    def _other_operand(self, x: torch.Tensor, storage: int, op: str, written: bool) -> None:
        """A call of a segment reads another tensor than the graph says, as an operator lays its result out otherwise on
        this device than on a CPU. The tensor is held, if the call does not write to it. Under a budget masks alone
        are, which plans count: one of each, not larger than planned."""
        if written or (self.bound and not self._is_planned_mask(x, storage)):
            expected = f"{op} to read storage {storage} of the plan's graph"
            remedy = "take a policy that runs nothing anew" + ", or no budget" * self.bound
            raise PlanMismatchError(expected, "another tensor", remedy)

    def _is_planned_mask(self, x: torch.Tensor, storage: int) -> bool:
        graph, memory = self.program.graph, x.untyped_storage()  # type: ignore[union-attr]
        fits = storage in graph.masks and memory.nbytes() <= graph.storages[storage].nbytes
        return fits and self.masks.setdefault(storage, memory._cdata) == memory._cdata

    def stash(self, x: torch.Tensor, body: Body, decision: Decision, node: Any = None) -> Stash:
        """Have readers of x's storage as it is share that body. ``node``: x's ``grad_fn``, PyTorch's ReLU, where that
        shares its values with them."""
        memory, storage, program = x.untyped_storage(), decision.storage, self.program
        stash = Stash(body, storage, decision.codec, memory.nbytes(), decision.reason, node)
        self.table.add(x, memory, stash)
        if node is not None:
            node._raw_saved_result.register_hooks(PACKED, stash.dense)
        if program is not None and storage in program.sources:
            self.nodes[storage] = node or x.grad_fn
        return stash

    def is_source(self, storage: int) -> bool:
        return self.program is not None and storage in self.program.sources

    def alias(self, x: torch.Tensor, decision: Decision) -> Kept:
        """Keep the tensor itself, with PyTorch's check against writes; recorded for the report."""
        kept, storage = SavedAsIs(x), x.untyped_storage()
        if storage._cdata not in self.dense and not is_weight(x):
            reason = self.notes.get(decision.storage, decision.reason)
            found = DenseStorage(StorageWeakRef(storage), storage.nbytes(), decision.storage, reason)
            self.dense[storage._cdata] = found
        if decision.storage >= 0:
            self.aliases[decision.storage] = kept
            if self.is_source(decision.storage) and self.table.named(decision.storage) is None:
                self.nodes[decision.storage] = x.grad_fn
            # now and then the zeros of what is kept dense although zeros are likely are counted: that may have changed
            if self.probing and self.forecasts and self.table.tagged(x) and x.dtype in KERNEL_DTYPES and covers(x):
                self.packer.count(x.detach(), self.forecasts.of(decision.storage))
        return kept

    def record_own(self, call: int, op: str, kept: Any) -> None:
        if kept is not None:
            self.own.append((call, op, kept))

    def cannot(self, decision: Decision, why: str) -> None:
        """A decision that is not carried out: noted for the report, an error where the plan promises a budget."""
        if decision.storage < 0:
            return
        where = " on the host" if decision.on_host else ""
        self.notes[decision.storage] = f"not {decision.codec}{where} as planned: {why}"
        if self.bound:
            op, module, shape = self.program.origin(decision.storage) if self.program else ("", "", ())
            raise PlanError(
                f"the plan's budget cannot be kept: storage {decision.storage} ({op} of {module or 'the model'}, shape "
                f"{shape}) was to be {decision.codec!r}{where}, and {why}; take another policy or class of moves, a "
                "plan for a batch like this one, or no budget"
            )

    def kept_by(self, storage: int, node: Any) -> Stash | Kept | None:
        """The hold on a planned storage's values, if ``node`` is what made them."""
        if node is None or self.nodes.get(storage) is not node:
            return None
        return self.table.named(storage) or self.aliases.get(storage)

    def measured(self) -> dict[int, float]:
        coded = [s for s in self.table.stashes if s.codec in CODECS]
        found = [(s.storage, getattr(s.body, "density", None)) for s in coded]
        return self.densities | {storage: share for storage, share in found if storage >= 0 and share is not None}

    def finish(self) -> None:
        """The forward returned: have all its calls been made?"""
        self.store_deferred()
        if self.journey is not None:
            self.journey.end()
        if self.program is not None:
            expected = len(self.program.steps) if self.expected is None else self.expected
            if self.seen != expected:
                self.diverge(f"{expected} covered calls", f"{self.seen}")
        if self.tape is not None:
            self.tape.close()

    def clear(self) -> None:
        for known in (self.table, self.norms, self.nodes, self.aliases, self.own, self.dense):
            known.clear()
        self.deferred = None
        if self.tape is not None:
            self.tape.clear()
            self.tape = None  # it knows the state: a cycle would wait for the garbage collector
