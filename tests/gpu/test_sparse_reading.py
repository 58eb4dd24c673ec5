"""zvc and csr read on a CUDA device, decoded and in ReLU's backward, against the oracle on CPU tensors, bit for bit."""

import pytest

from gistkit.kernels import ops
from gistkit.kernels.reference import sparse as reference
from tests.gpu.sparse_on_device import LENGTHS, device_case, make_case, on_device
from tests.support.sparse_cases import PAYLOADS, SCALED, UNSCALED, decoded, relu_gradient
from tests.support.tensors import FLOATS, same_bits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("codec", PAYLOADS)
@pytest.mark.parametrize("fmt, scaling", UNSCALED + SCALED)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", LENGTHS)
def test_decoding_and_relu_backward_equal_the_oracle(codec, fmt, scaling, dtype, n):
    case = make_case(n, dtype, fmt, scaling)
    for payload in PAYLOADS[codec](reference, case):
        there = on_device(payload)
        assert same_bits(decoded(ops, device_case(case), there, codec).cpu(), decoded(reference, case, payload, codec))
        gradient = relu_gradient(ops, device_case(case), there, codec)
        assert same_bits(gradient.cpu(), relu_gradient(reference, case, payload, codec))
