"""What the readers of a storage permit: rounded values, or a mask that a pool's map carries.

Gist (III-B) narrows feature maps between their two uses. In statistics, logarithms and divisors a value flushed to zero
makes a gradient infinite, so only the readers below, products and smooth functions, are given narrow copies. What comes
back from rounded values, by a rebuild or a rerun, is rounded too: it goes to the same readers alone, and to no ReLU
without a mask of its own, since masks are exact (IV-A).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from gistkit import formats
from gistkit.ir import KERNEL_DTYPES, Call, CallChoice, Decision, Reading, Save

_COVERED_FIELDS = {
    "conv2d": ("input",),
    "linear": ("self", "input", "mat1", "mat2"),
    "batch_norm": ("input",),
    "relu": ("result",),
}
_NODES = {
    **{f"{name}Backward0": ("self", "mat1", "mat2", "batch1", "batch2", "input") for name in
       ("Addmm", "Mm", "Bmm", "Baddbmm", "Linear", "Mv", "Convolution", "ConvolutionOverrideable")},
    **{f"{name}Backward0": ("input",) for name in
       ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "NativeLayerNorm", "NativeGroupNorm")},
    **{f"{name}Backward0": ("self", "result", "other") for name in
       ("Mul", "Gelu", "Silu", "Mish", "Elu", "LeakyRelu", "PreluKernel", "Hardtanh", "Hardswish", "Hardsigmoid",
        "Softplus", "Sigmoid", "Tanh", "Relu", "Threshold", "Softmax", "SafeSoftmax")},
}  # fmt: skip


def may_narrow(call: Call, save: Save) -> bool:
    """Whether the reader of a saved tensor tolerates a narrow copy of it."""
    covered = call.covered >= 0 and save.field in _COVERED_FIELDS.get(call.op, ())
    return covered or save.field in _NODES.get(save.node, ())


def intolerant(storage: int, reading: Reading, masked: bool = True) -> Call | None:
    """The first call whose backward must not read a storage rounded, None where none is. ``masked``: a ReLU that made
    the storage has its mask beside it."""
    uses = reading.uses(storage)
    if uses.relu is not None and not masked and any(s.storage == storage for s in uses.relu.saves):
        return uses.relu
    return next((call for call, save in uses.readers if not may_narrow(call, save)), None)


def rounded(storage: int, decided: Callable[[int], Decision | None], above: tuple[int, ...] = ()) -> bool:
    """Whether backward finds a storage's values rounded: kept so, or made anew from what is. ``decided`` gives a
    storage's decision, None for none; ``above`` are the storages that are made of it."""
    found = decided(storage)
    if found is None or storage in above:
        return False
    return bool(found.form.rounds_to) or any(rounded(s, decided, (*above, storage)) for s in found.sources)


def map_bits(pool: Call, reading: Reading, carries_mask: bool) -> int | None:
    """Bits of one code of a covered max-pool's map: 4, 8, or None where PyTorch's own pool runs. A map that also
    carries a mask needs one code for "no gradient" beside the window's positions."""
    if pool.covered < 0 or pool.options is None or len(reading.operand(pool).shape) != 4:
        return None
    codes = prod(pool.options["kernel_size"]) + carries_mask
    dilated = prod(pool.options["dilation"]) != 1
    if dilated or reading.operand(pool).dtype not in KERNEL_DTYPES or codes > formats.ARGMAX8_POSITIONS:
        return None
    return 4 if codes <= formats.ARGMAX4_POSITIONS else 8


def mask_carrier(relu: Call, reading: Reading) -> Call | None:
    """The max-pool whose map can carry a ReLU's mask: the ReLU output's only reader, whatever the reader wants. A hook,
    a view, a second branch may each ask for the ReLU's own gradient; who asks for the pool's node may hang a hook on it
    that changes the gradient. Escaping storages are decided before."""
    value = reading.graph.values[relu.results[0]]
    readers = reading.readers_after(relu, value.storage)
    pool = readers[0] if len(readers) == 1 and value.whole else None
    if pool is None or pool.op != "max_pool2d" or pool.operands[0] != value.id:
        return None
    pooled = [reading.graph.values[i].storage for i in pool.results]
    if any(c.op == "grad_fn" for storage in pooled for c in reading.readers_after(pool, storage)):
        return None
    return pool if map_bits(pool, reading, carries_mask=True) is not None else None


def call_choices(reading: Reading, decisions: Mapping[int, Decision]) -> tuple[CallChoice, ...]:
    """The choices that differ from a call's plain way, in call order."""
    choices: dict[int, CallChoice] = {}
    for call in reading.graph.calls:
        if call.op != "relu" or call.covered < 0 or not (call.operands and call.results):
            continue
        decision = decisions.get(reading.graph.values[call.results[0]].storage)
        pool = mask_carrier(call, reading)
        if decision is not None and decision.form.gone and pool is not None:
            choices |= {c.covered: CallChoice(c.covered, c.op, mask_in_pool=True) for c in (call, pool)}
    return tuple(choice for _, choice in sorted(choices.items()))
