"""One forward under gistkit: what has been stashed so far, and how the next tensor is kept.

A region lives from the first to the last instruction of one forward. With a program (a compiled plan) every covered
call has its decisions; without one, or after the forward left its plan, decisions follow from the tensor alone
(:func:`gistkit.runtime.program.settings.ad_hoc`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gistkit.capture import Bound
from gistkit.codecs import CODECS, Codec, Encoded, Sparse
from gistkit.ir import CallChoice, Decision
from gistkit.nn.eligible import KERNEL_DTYPES
from gistkit.nn.keep import Alias, Kept
from gistkit.planning.forms import rounds
from gistkit.runtime.calls.one_pass import OnePassBody
from gistkit.runtime.forward.kept_ledger import Accounts
from gistkit.runtime.forward.provenance import Origins
from gistkit.runtime.forward.watch import Watch
from gistkit.runtime.offload.host import HostBody
from gistkit.runtime.program.density_excess import Room
from gistkit.runtime.program.match_plan import check_call
from gistkit.runtime.program.program import Key, Program, Step
from gistkit.runtime.program.refusals import cannot_keep, cannot_run, left, not_as_planned
from gistkit.runtime.program.settings import KEEP_DENSE, WITHOUT_VALUES, Settings, ad_hoc
from gistkit.runtime.rebuild.rebuild import BatchNormTerm
from gistkit.runtime.recompute.checks import Checks
from gistkit.runtime.recompute.tape import Tape
from gistkit.runtime.sparse_sizes.counts import Ticket
from gistkit.runtime.sparse_sizes.exact import ExactPacker
from gistkit.runtime.sparse_sizes.forecast import Forecasts
from gistkit.runtime.stash.stash import Body, CodedBody, Reader, Stash, StashTable, covers, whole

PAYS = 0.95
DENSE = "too dense for sparse storage to pay"
AGAIN = "a segment that runs anew in backward starts from it"


def _settled(codec: Codec, x: torch.Tensor) -> Encoded:
    """The encoding of x in its exact size; waits for the device where only that knows it."""
    encoded = codec.encode(x)
    if encoded.pending and isinstance(codec, Sparse):
        codec.settle(encoded, int(codec.total(encoded)))
    return encoded


@dataclass
class Region(Accounts):
    """The state of one forward; cleared when it ends, so that only backward nodes hold on to anything.

    ``strict``: the plan is the caller's; ``bound``: and promises a budget, of which ``room`` keeps account.
    ``forecasts``: what earlier steps say of the storages' densities, None under a budget. ``instead``
    is the covered call in whose place PyTorch's own op runs (-1: none). ``fast``: the program's fast calls
    (:mod:`gistkit.runtime.calls.fast`), none where this forward goes the long way; ``learnt`` is the one that a
    handler has just left, ``affines`` what batch norms' share (:mod:`gistkit.runtime.calls.fast_norm`).
    """

    settings: Settings
    packer: ExactPacker
    program: Program | None = None
    strict: bool = False
    verified: dict = field(default_factory=dict)
    table: StashTable = field(default_factory=StashTable)
    watch: Watch = field(default_factory=Watch)
    norms: dict[int, BatchNormTerm] = field(default_factory=dict)
    origins: Origins = field(init=False)
    calls: int = 0
    unread: bool = False
    bound: bool = False
    room: Room | None = None
    forecasts: Forecasts | None = None
    instead: int = -1
    fast: list = field(default_factory=list)
    learnt: Any = None
    affines: dict[int, tuple] | None = None
    turns: dict[Key, int] = field(default_factory=dict)
    met: set[int] = field(default_factory=set)
    probing: bool = False
    overwrites: bool = True
    diverged: str = ""
    aliases: dict[int, Kept] = field(default_factory=dict)
    probes: list[tuple[int, int, Ticket]] = field(default_factory=list)
    tape: Tape | None = None

    def __post_init__(self) -> None:
        self.origins = Origins(self.table.known)
        again = None if self.program is None else self.program.again
        if again is not None:
            # as with rebuilds: what starts from rounded values does not give the forward's bits
            verified = None if self.settings.lossy is not None else self.verified
            self.tape = Tape(again, self._outside, Checks(verified, self._not_again, lambda: self.bound))

    def learn(self, step: Step, func: Any, bind: Any) -> None:
        """Keep the fast call that the call's handler has left, for the forwards to come."""
        learnt, self.learnt = self.learnt, None
        if self.program is not None:
            self.program.fast[step.index] = (func, bind, learnt, self.program.call(step.index).index)

    def next_step(self, op: str, bound: Bound) -> Step:
        """The plan's word on the covered call that comes now; a blank one without a plan. Under a budget the call must
        be the planned one in its strides and the like, too."""
        index, self.calls = self.calls, self.calls + 1
        if self.program is None:
            return Step(index, op, CallChoice(index, op), None, None)
        step = self.program.step(index)
        if step is not None and step.op == op:
            if self.strict and self.program.plan.budget_bytes is not None:
                check_call(self.program, index, bound)
            return step
        self.diverge(f"call {index} to be {step.op if step else 'the end'}", op)
        return Step(index, op, CallChoice(index, op), None, None)

    def diverge(self, expected: str, got: str) -> None:
        """The forward left its plan: an error where the caller gave the plan, else go on without it."""
        if self.strict:
            raise left(expected, got)
        self.diverged = f"expected {expected}, got {got}"
        self.program = None
        self.fast = []
        self.watch.settle_all()

    def slices(self, step: Step) -> int:
        """Batch slices of a call's weight gradient: the plan's where the caller gave one."""
        return step.choice.slices if self.strict else self.settings.slices

    def mark_sparse(self, y: torch.Tensor) -> None:
        """Remember that y is worth zero-value compression (a ReLU's output, or a pool's or dropout's after one)."""
        self.table.tag(y)

    def keep(self, x: torch.Tensor, decision: Decision | None) -> Kept:
        """A hold on x for one backward node: the stash that exists, else a new one as decided, else x itself."""
        stash = self.table.find(x)
        if stash is not None:
            body = stash.body
            return body if type(body) is OnePassBody and body.is_like(x) else Reader(stash, x)
        if decision is None:
            # a plan of the caller's counts what it leaves open, or what a branch without a backward saves, as it is
            decision = KEEP_DENSE if self.strict else ad_hoc(x, self.table.tagged(x), self.settings)
        elif decision.codec in WITHOUT_VALUES:
            self.cannot(decision, "a backward needs its values")
            other = KEEP_DENSE if self.strict else ad_hoc(x, self.table.tagged(x), self.settings)
            decision = replace(other, storage=decision.storage)
        made = self.encode(x, decision)
        return self.alias(x, decision) if made is None else Reader(made, x)

    def keep_exact(self, x: torch.Tensor) -> Kept:
        """A hold on x for a node that no plan speaks of, which may not bear rounded values."""
        stash = self.table.find(x)
        if stash is None:
            return self.keep(x, ad_hoc(x, self.table.tagged(x), replace(self.settings, lossy=None)))
        planned = stash.storage >= 0 and self.program is not None  # for all of its readers
        exact = planned or not (rounds(stash.codec) or stash.codec in WITHOUT_VALUES or stash.codec == "recompute")
        return self.keep(x, None) if exact else self.alias(x, KEEP_DENSE)

    def encode(self, x: torch.Tensor, decision: Decision) -> Stash | None:
        """Stash x's storage under the decision's codec; None (and a note) where that is impossible or does not pay."""
        to_host = decision.place == "host"
        if decision.codec == "dense" and not to_host:
            return None
        if decision.codec == "recompute":
            return self._recomputed(x, decision)
        if decision.codec in WITHOUT_VALUES:  # what reads a stash wants values
            self.cannot(decision, "a backward needs its values")
            return None
        codec = CODECS.get(decision.codec)
        if codec is None:
            return None
        if decision.codec == "dense":
            return self._stash(x, HostBody(codec.encode(whole(x.detach()))), decision)
        why = "a view of a part of a storage" if not covers(x) else codec.accepts(x)
        if why:
            self.cannot(decision, why)
            return None
        x = x.detach()
        if self.room is not None and isinstance(codec, Sparse):
            body = self.room.body(codec, x, decision, self.packer)
            if body is not None:
                return self._stash(x, body, decision)
        # a plan of the caller's counts on what little it saves
        pays_bytes = (1.0 if self.strict else PAYS) * x.numel() * x.element_size()
        forecast = None if to_host or self.forecasts is None else self.forecasts.of(decision.storage)
        fit = self.packer.fit(codec, x, forecast)
        if fit.capacity and isinstance(codec, Sparse):
            if codec.within_bytes(x.numel(), x.dtype, fit.capacity) > pays_bytes:
                self.notes[decision.storage] = DENSE
                return None
        # what goes to the host goes in its exact size, for which a GPU is waited for
        encoded = _settled(codec, x) if to_host else self.packer.encode(codec, x, forecast=forecast, fit=fit)
        if not encoded.pending:
            if encoded.nonzeros is not None and decision.storage >= 0:
                self.densities[decision.storage] = encoded.nonzeros / max(encoded.numel, 1)
            if encoded.nbytes > pays_bytes:
                self.notes[decision.storage] = DENSE
                return self.encode(x, replace(decision, codec="dense")) if to_host else None
        return self._stash(x, HostBody(encoded) if to_host else CodedBody(encoded), decision)

    def _recomputed(self, x: torch.Tensor, decision: Decision) -> Stash | None:
        body = "its forward is not written down" if self.tape is None else self.tape.body(x, decision)
        if isinstance(body, str):
            self.cannot(decision, body)
            return None
        return self._stash(x, body, decision)

    def _outside(self, x: torch.Tensor, storage: int) -> Kept:
        """A hold for a segment on what it starts from."""
        if self.program is None or storage < 0 or self.program.graph.storages[storage].kind != "activation":
            return Alias(x)
        return self.keep(x, self.program.decision(storage) or replace(KEEP_DENSE, storage=storage, reason=AGAIN))

    def _not_again(self, storage: int, why: str) -> None:
        decision = None if self.program is None else self.program.decision(storage)
        if decision is not None:
            self.cannot(decision, why)

    def _stash(self, x: torch.Tensor, body: Body, decision: Decision) -> Stash:
        plain = x.untyped_storage().nbytes()
        stash = Stash(body, decision.storage, decision.codec, plain, decision.reason)
        self.stashed(x, stash)
        return stash

    def stashed(self, x: torch.Tensor, stash: Stash, tag: bool = False) -> None:
        """Readers of x's storage as it is now share that stash; with ``tag`` as :meth:`mark_sparse` does too."""
        self.table.add(x, stash, tag)
        if self.program is not None and stash.storage in self.program.sources:
            self.origins.made("stash", stash.storage, x)

    def cannot(self, decision: Decision, why: str) -> None:
        """A decision that is not carried out: noted for the report, an error where the plan promises a budget."""
        if decision.storage < 0:
            return
        self.notes[decision.storage] = not_as_planned(decision, why)
        if self.bound:
            raise cannot_keep(decision, self.program, why)

    def cannot_run(self, step: Step, how: str, why: str) -> None:
        """A call that cannot run as planned: an error where the plan promises a budget."""
        if self.bound:
            raise cannot_run(step, how, why)

    def alias(self, x: torch.Tensor, decision: Decision) -> Kept:
        """Keep the tensor itself, with PyTorch's check against writes; remembered for the report."""
        kept = Alias(x)
        self.hold(x, decision)
        if decision.storage >= 0:
            self.aliased(x, decision.storage, kept)
            if self.probing and self.table.tagged(x) and x.dtype in KERNEL_DTYPES and covers(x):
                # Kept dense although zeros are likely: count them now and then, as that may have changed.
                self.probes.append((decision.storage, x.numel(), self.packer.count(x.detach())))
        return kept

    def aliased(self, x: torch.Tensor, storage: int, kept: Kept) -> None:
        """The values of a planned storage are x's own, unless a stash has them."""
        self.aliases[storage] = kept
        if self.program is not None and storage in self.program.sources and self.table.named(storage) is None:
            self.origins.made("stash", storage, x)

    def measured(self) -> dict[int, float]:
        """Density by planned storage id, as this step's sparse stashes say."""
        found = ((s.storage, getattr(s.body, "density", None)) for s in self.table.stashes() if s.storage >= 0)
        return self.densities | {storage: density for storage, density in found if density is not None}

    def finish(self) -> None:
        """The forward returned: is everything that the plan relies on as it should be?"""
        if self.program is not None and self.calls != self.program.length:
            self.diverge(f"{self.program.length} covered calls", f"{self.calls}")
        self.watch.close()
        if self.tape is not None:
            self.tape.close()

    def kept(self, storage: int) -> Kept | None:
        """The hold on a planned storage's values, for recipes."""
        stash = self.table.named(storage)
        return self.aliases.get(storage) if stash is None else stash.body

    def clear(self) -> None:
        """Let go of everything; called however the forward ended."""
        self.table.clear()
        self.norms.clear()
        self.origins.clear()
        self.aliases.clear()
        self.clear_accounts()
        self.affines = None
        if self.tape is not None:
            self.tape.clear()
            self.tape = None  # it knows the region: a cycle would wait for the garbage collector
