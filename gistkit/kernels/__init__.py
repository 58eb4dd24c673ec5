"""Kernels: one operator schema, three implementations (Triton, reference, fake)."""

from gistkit.kernels.compat import capturing, current_device, current_stream, torch_stream
from gistkit.kernels.cudnn_convolutions import (
    ENGINE,
    PARTS,
    ConvTask,
    EnginePlan,
    conv_task,
    engines,
    engines_missing,
    run_engine_plan,
)
from gistkit.kernels.launch.direct import Masks
from gistkit.kernels.layout import (
    FORMS,
    STRIDES,
    bits_of,
    flat,
    is_channels_last,
    is_dense,
    nibbles_pack,
    nibbles_unpack,
    value_dtype,
)
from gistkit.kernels.pool.geometry import forward_geometry
from gistkit.kernels.signed_zero import relu_keeps_negative_zero
from gistkit.kernels.sparse.spill import known_bytes, packed_bytes, spill_bytes
