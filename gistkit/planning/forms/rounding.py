"""Which readers in backward may be given rounded values.

Gist (III-B) narrows feature maps between their two uses. In statistics, logarithms and divisors a value flushed to zero
makes a gradient infinite, so only the readers below, products and smooth functions, are given narrow copies. What comes
back from rounded values, by a rebuild or a rerun, is rounded too: it goes to the same readers alone, and to no ReLU
without a mask of its own, since masks are exact (IV-A).
"""

from __future__ import annotations

from collections.abc import Callable

from gistkit.ir import FORMS, Call, Decision, Reading, Save

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


def rounds(codec: str) -> bool:
    """Whether a form rounds values."""
    return bool(FORMS[codec].rounds_to)


def rounded(storage: int, decided: Callable[[int], Decision | None], above: tuple[int, ...] = ()) -> bool:
    """Whether backward finds a storage's values rounded: kept so, or made anew from what is. ``decided`` gives a
    storage's decision, None for none; ``above`` are the storages that are made of it."""
    found = decided(storage)
    if found is None or storage in above:
        return False
    return bool(found.form.rounds_to) or any(rounded(s, decided, (*above, storage)) for s in found.sources)
