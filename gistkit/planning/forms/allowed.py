"""Which forms the storages of a step may take. One judge answers for everybody: Gist's rules take the smallest allowed
form (:mod:`gistkit.planning.policies.gist_rules`), `optimal` chooses among all (:mod:`gistkit.planning.forms.options`),
a plan from a file is compared before anything runs (:func:`check_decisions`). The judge does not weigh what a form
saves. Which calls a rerun may repeat: :mod:`gistkit.planning.forms.recompute`."""

from __future__ import annotations

from collections.abc import Iterable

from gistkit.errors import PlanError
from gistkit.ir import (
    FORMS,
    KERNEL_DTYPES,
    LIBRARY,
    OPERATORS,
    REMEDY,
    RERUN,
    STAY,
    Call,
    Decision,
    Form,
    Plan,
    Reading,
    SavedGraph,
    written_late,
    zeros_left_out,
)  # fmt: skip
from gistkit.planning.forms.predicted import held
from gistkit.planning.forms.readers import intolerant, map_bits, mask_carrier, may_narrow, rounded
from gistkit.planning.forms.rebuild import Decide, Recipe, circular, recipe_of

KEEPERS = ("max_pool2d", "dropout", "batch_norm")
"""Covered ops that keep for themselves what they make besides their result."""
SMALL_BYTES, SMALL_SHARE = 4096, 2**14
"""What is smaller, or a smaller share of all kept bytes, is not worth an encoding: 24 of RegNetY-016's 31 sparse
encodings (128 images) were of gates' inputs that save 0.2 of 2,726 MiB."""
_NO_RECIPE = "it does not follow from what batch norms and additions read and what is kept with its values"


class Judge:
    """The forms of one graph's storages. ``kept`` are those that plain PyTorch keeps, ``own`` those that operators make
    for themselves, ``late`` those written only after they are saved."""

    def __init__(self, graph: SavedGraph) -> None:
        self.graph, self.reading = graph, Reading(graph)
        self.own, self.late = kept_by_ops(graph), written_late(graph)
        self.kept = {s.id for s in graph.kept()}
        self.least_bytes = max(SMALL_BYTES, graph.kept_bytes // SMALL_SHARE)

    def allowed(self, storage: int, names: Iterable[str] = FORMS) -> tuple[Decision, ...]:
        """The forms, of those named, that a kept storage may take on the device, each as a decision with its reason. A
        rebuild starts from storages that may keep their values; the sources of a rerun are for a plan to choose."""
        return tuple(self._decision(storage, FORMS[name]) for name in names if not self.why_not(storage, FORMS[name]))

    def why_dense(self, storage: int) -> str:
        """Why an encoding of what is read by value would free nothing, or there is none; '' where there may be one."""
        s = self.graph.storages[storage]
        if s.kind == "input":
            return "held by the caller"
        if s.id in self.late:
            return "written only after it is saved"
        if s.nbytes < self.least_bytes:
            return "too small to pay"
        if s.dtype not in KERNEL_DTYPES:
            return f"no codec for {s.dtype}"
        if self.reading.uses(s.id).value is None:
            return "saved in parts, or as something else than one whole value"
        return "still held outside the forward (an output, or put away by the model)" if s.escapes else ""

    def why_not(self, storage: int, form: Form, *, on_host: bool = False) -> str:
        """Why a storage cannot take a form, on the device or on the host, '' where it can."""
        s = self.graph.storages[storage]
        if form.returns == STAY and not on_host:
            return ""
        if s.kind not in ("input", "activation"):
            return f"it is a {s.kind}, which stays as it is"
        if storage in self.late:
            return "it is written only after it is saved"
        if storage in self.own:
            own = self.own_map(storage)
            fits = own is not None and own.codec == form.name
            return "" if fits else "its op keeps it for itself in a form of its own"
        uses = self.reading.uses(storage)
        if not form.values and uses.readers:
            reader = uses.readers[0][0]
            return f"the backward of {reader.op} (call {reader.index}) needs its values"
        if form.made_by_op and not form.values:
            return "only a max-pool makes such a map, for itself"
        if form.signs and not form.values and uses.relu is None:
            return "it is no ReLU's output"
        if form.returns == RERUN:
            return self._why_no_rerun(storage)
        if form.returns == OPERATORS and self.recipe(storage, self._with_values) is None:
            return _NO_RECIPE
        if form.payload and form.dtypes is not None and s.dtype not in form.dtypes:
            return f"its dtype is {s.dtype}"
        strict = next((c for c, save in uses.readers if not may_narrow(c, save)), None) if form.rounds_to else None
        return "" if strict is None else f"the backward of {strict.op} (call {strict.index}) takes no rounded values"

    def refusal(self, d: Decision, decided: Decide) -> str:
        """Why a plan's decision cannot be carried out, '' where it can. ``decided`` gives the plan's decisions."""
        if d.stays:
            return ""
        why = self.why_not(d.storage, d.form, on_host=d.on_host) or _misplaced(d)
        if why or d.storage in self.own:
            return why
        if d.form.payload and not d.form.signs and not d.mask and self.reading.uses(d.storage).relu is not None:
            return "the ReLU that made it needs a mask beside rounded values"
        return self._rebuild_refusal(d, decided) if d.form.returns == OPERATORS else ""

    def recipe(self, storage: int, decide: Decide) -> Recipe | None:
        """How a ReLU's output is rebuilt, None where it cannot be; ``decide`` gives the sources' decisions."""
        relu = self.reading.uses(storage).relu
        return None if relu is None else recipe_of(relu, self.reading, decide)

    def own_map(self, storage: int) -> Decision | None:
        """The map or mask that a covered op writes for its own backward, smaller than PyTorch's: a max-pool's, a
        dropout's. None for any other storage."""
        savers = self.graph.savers(storage)
        call, s = (savers[0][0] if savers else None), self.graph.storages[storage]
        if call is None or len(savers) > 1 or call.covered < 0 or s.producer != call.index or storage in call.reads:
            return None
        if call.op == "max_pool2d" and s.dtype == "int64":
            bits = map_bits(call, self.reading, self._carries_mask(call))
            reason = "position in the window instead of an int64 index"
            return None if bits is None else Decision(storage, f"argmax{bits}", reason=reason)
        # under p=1 PyTorch keeps one zero instead of a mask
        masked = call.op == "dropout" and (call.options or {}).get("p") != 1
        if masked and self.reading.operand(call).dtype in KERNEL_DTYPES:
            return Decision(storage, "bits", reason="a dropout mask is 1 bit an element")
        return None

    def without_values(self, storage: int) -> Decision | None:
        """The smallest form of what backward asks for no numbers: 1 bit for a bool or for a ReLU's sign, nothing where
        the shape is all or where a pool's map has the sign. None for what is too small, and where values are read."""
        s, uses = self.graph.storages[storage], self.reading.uses(storage)
        fixed = storage not in self.kept or s.kind == "input" or storage in self.late
        if fixed or uses.value is None or s.nbytes < self.least_bytes:
            return None
        if s.dtype == "bool":
            return Decision(storage, "bits", reason="a bool is 1 bit")
        if uses.readers or s.dtype not in (*KERNEL_DTYPES, "float64"):
            return None
        if uses.relu is None:
            return Decision(storage, "drop", reason="backward reads its shape only")
        if s.escapes or s.dtype == "float64":
            return None
        if mask_carrier(uses.relu, self.reading) is not None:
            return Decision(storage, "drop", reason="the pool's map carries the mask")
        return Decision(storage, "mask1", reason="backward asks a ReLU output only for its sign")

    def _carries_mask(self, pool: Call) -> bool:
        storage = self.reading.operand(pool).storage
        found = self.without_values(storage)
        return found is not None and not found.form.payload and self.reading.uses(storage).relu is not None

    def _with_values(self, storage: int) -> Decision | None:
        """Stands in for the decision of a rebuild's source, which is still open."""
        found = self.own_map(storage) or self.without_values(storage)
        open_ = storage in self.kept and (found is None or found.form.values)
        return Decision(storage, "dense") if open_ else None

    def _decision(self, storage: int, form: Form) -> Decision:
        uses = self.reading.uses(storage)
        if form.returns == OPERATORS:
            recipe = self.recipe(storage, self._with_values)
            assert recipe is not None
            return rebuilt(storage, recipe)
        reason = f"{uses.readers[0][0].op} reads its values" if uses.readers else "backward reads no values of it"
        mask = form.payload and not form.signs and uses.relu is not None
        return Decision(storage, form.name, "nowhere" if form.returns == RERUN else "device", mask, reason=reason)

    def _why_no_rerun(self, storage: int) -> str:
        made = self.graph.storages[storage]
        if made.kind != "activation" or not self.graph.writers(storage):
            return "no call of the forward makes it"
        maker = self.graph.calls[made.producer] if made.producer >= 0 else None
        if maker is None or not maker.inplace or storage in {self.graph.values[v].storage for v in maker.results}:
            return ""
        module = maker.module or "the model"
        return f"it is the copy that {maker.op} of {module}, in place, saves of what it overwrites"

    def _rebuild_refusal(self, d: Decision, decided: Decide) -> str:
        recipe = self.recipe(d.storage, lambda s: decided(s) or Decision(s, "dense"))
        if recipe is None:
            return _NO_RECIPE
        if (recipe.steps, recipe.sources) != (d.recipe, d.sources):
            return f"it comes about as {recipe.steps} from storages {recipe.sources}"
        if circular(d.storage, decided):
            return "it would be rebuilt from itself"
        strict = intolerant(d.storage, self.reading, d.mask) if rounded(d.storage, decided) else None
        if strict is None:
            return ""
        return f"the backward of {strict.op} (call {strict.index}) takes no rounded values, and what it follows from is"


def rebuilt(storage: int, recipe: Recipe) -> Decision:
    """The decision to rebuild a ReLU's output, with its mask."""
    follows = "the terms of the addition" if "add" in str(recipe.steps) else "what batch norm keeps"
    return Decision(storage, "rebuild", "nowhere", True, recipe.sources, f"follows from {follows}", recipe.steps)


def default_form(dtype: str, nbytes: int, *, zeros: bool, lossy: str | None = None) -> Decision:
    """The form of a tensor that no plan speaks of: always correct, not always the smallest. ``zeros``: many elements
    are expected to be zero. ``lossy``: the narrow format that its readers may be given."""
    if dtype in (FORMS["bits"].dtypes or ()):
        return Decision(-1, "bits", reason="a mask of 1 bit an element")
    if dtype not in KERNEL_DTYPES or nbytes < SMALL_BYTES or not (zeros or lossy):
        return Decision(-1, "dense", reason="kept as it is")
    name = zeros_left_out(lossy) if zeros else lossy or ""
    return Decision(-1, name, reason="a ReLU's output, zeros left out" if zeros else "delayed precision reduction")


def _misplaced(d: Decision) -> str:
    if d.form.payload:
        return "its payload must be somewhere" if d.place == "nowhere" else ""
    return "what has no payload is in no place" if d.on_host else ""


def check_decisions(plan: Plan, graph: SavedGraph) -> None:
    """Raise PlanError naming the first decision of a plan that its storage in the captured forward cannot have."""
    judge, decided = Judge(graph), {d.storage: d for d in plan.decisions}
    for decision in plan.decisions:
        why = judge.refusal(decision, decided.get)
        if why:
            s = graph.storages[decision.storage]
            maker = "an input" if s.producer < 0 else f"{graph.calls[s.producer].op}, shape {s.shape}"
            raise PlanError(
                f"compress: plan is damaged: storage {s.id} ({maker}) cannot be {decision.codec!r} with place "
                f"{decision.place!r}: {why}; {REMEDY}"
            )


def kept_by_ops(graph: SavedGraph) -> set[int]:
    """Storages that the runtime's operators make and keep for themselves besides their results: statistics, maps,
    masks. Nothing in a library's view."""
    keepers = (c for c in graph.calls if c.covered >= 0 and c.op in KEEPERS and graph.source != LIBRARY)
    saved = ((s.storage, c) for c in keepers for s in c.saves if graph.storages[s.storage].producer == c.index)
    return {s for s, call in saved if s not in {graph.values[v].storage for v in call.results}}


def own_decisions(graph: SavedGraph) -> tuple[Decision, ...]:
    """What the runtime's operators do under any plan, whatever the policy: pools write small maps, dropouts bits, what
    backward reads the shape of is let go of. Nothing in a library's view, whose operators are the library's."""
    if graph.source == LIBRARY:
        return ()
    judge = Judge(graph)
    found = (judge.own_map(b.storage) or judge.without_values(b.storage) for b in held(graph) if b.storage >= 0)
    return tuple(d for d in found if d and (d.form.made_by_op or judge.reading.uses(d.storage).relu is None))
