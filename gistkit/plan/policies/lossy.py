"""Where delayed precision reduction may go: what backward reads through a product or a smooth function.

Gist (III-B) narrows feature maps between their two uses. Statistics, logarithms and divisors are no feature maps: a
value flushed to zero there makes a gradient infinite. So only readers known to be harmless are narrowed, the rest stays
dense.
"""

from __future__ import annotations

from gistkit.graph.saved import Call, Save

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
