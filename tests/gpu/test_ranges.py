"""Parts of sparse storage on the device against the oracle on the CPU."""

import pytest
import torch

from gistkit.codecs import CODECS, Sparse
from gistkit.runtime.stash.verify import same_bits

pytestmark = pytest.mark.gpu
NAMES = sorted(name for name, codec in CODECS.items() if isinstance(codec, Sparse))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_parts_before_and_after_settling(name, dtype):
    x = torch.relu(torch.randn(300_001)).to(dtype)
    codec = CODECS[name]
    whole = codec.decode(codec.encode(x))
    encoded = codec.encode(x.cuda())
    for _ in range(2):
        for start, stop in ((0, 300_001), (1000, 70_007), (299_000, 300_001)):
            assert same_bits(codec.decode_range(encoded, start, stop).cpu(), whole[start:stop])
        if encoded.pending:
            codec.settle(encoded, int(codec.total(encoded)))
