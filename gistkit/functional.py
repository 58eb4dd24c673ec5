"""``gistkit.functional``: torch.nn.functional's results, bit for bit, with less kept for backward."""

from gistkit.nn.conv import conv2d
from gistkit.nn.dropout import dropout
from gistkit.nn.keep import Keep, Kept, keep_coded, keep_dense
from gistkit.nn.linear import linear
from gistkit.nn.norm import batch_norm
from gistkit.nn.pool import max_pool2d, relu_max_pool2d
from gistkit.nn.relu import relu

__all__ = [
    "Keep",
    "Kept",
    "batch_norm",
    "conv2d",
    "dropout",
    "keep_coded",
    "keep_dense",
    "linear",
    "max_pool2d",
    "relu",
    "relu_max_pool2d",
]
