"""Where delayed precision reduction may go: what backward reads through a product or a smooth function.

Gist (III-B) narrows feature maps between their two uses. Statistics, logarithms and divisors are no feature maps: a
value flushed to zero there makes a gradient infinite. So only readers known to be harmless are narrowed, the rest stays
dense. What comes back from rounded values, by a rebuild or a rerun, is rounded too: it goes to the same readers alone,
and to no ReLU without a mask of its own, since masks are exact (IV-A).
"""

from __future__ import annotations

from collections.abc import Callable

from gistkit.codecs import VALUE_FORMS
from gistkit.ir import Call, Decision, Reading, Save

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
    if call.covered >= 0 and save.field in _COVERED_FIELDS.get(call.op, ()):
        return True
    return save.field in _NODES.get(save.node, ())


def intolerant(storage: int, reading: Reading, masked: bool = True) -> Call | None:
    """The first call whose backward must not read a storage rounded, None where none is; ``masked``: a ReLU that made
    the storage has its mask beside it."""
    value = reading.saved(storage)
    relu = None if value is None else reading.relu_behind(value)
    strict = (call for call, save in reading.value_readers(storage, relu) if not may_narrow(call, save))
    if relu is not None and not masked and any(s.storage == storage for s in relu.saves):
        return relu
    return next(strict, None)


def rounds(codec: str) -> bool:
    """Whether a codec's name has a narrow value format in it."""
    return any(part in VALUE_FORMS for part in codec.split("+"))


def rounded(storage: int, decided: Callable[[int], Decision | None], above: tuple[int, ...] = ()) -> bool:
    """Whether backward finds a storage's values rounded: kept so, or made anew from what is. ``decided`` gives a
    storage's decision, None for none; ``above``: what is made of it."""
    found = decided(storage)
    if found is None or storage in above:
        return False
    return rounds(found.codec) or any(rounded(s, decided, (*above, storage)) for s in found.sources)
