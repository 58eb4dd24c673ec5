"""The general max-pool backward, which the common windows do not take, on the architectures beside sm_90."""

import pytest

from gistkit.kernels.pool.backward import backward_kernel
from tests.aot.harness import CAPABILITIES
from tests.aot.test_pool import _compile, _windows


@pytest.mark.parametrize("capability", [c for c in CAPABILITIES if c != 90])
def test_the_general_backward_compiles_without_spills(capability):
    windows = {**_windows(5, 2, 3), "DH": 2, "DW": 2}
    sizes = {"CHANNELS_LAST": False, "WIDE": True, "V": 1, "LANES": 1024, "BITS": 8}
    _compile(backward_kernel, "bf16", capability, PORTABLE=False, **windows, **sizes)
