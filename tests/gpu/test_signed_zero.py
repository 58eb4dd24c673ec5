"""The ReLU of -0.0: what PyTorch's own makes of it on this device, asked once, in no capture, with no flagged wait."""

import pytest
import torch

from gistkit.kernels import ops, signed_zero
from gistkit.kernels.signed_zero import relu_keeps_negative_zero
from tests.gpu.waiting import no_synchronisation
from tests.support.tensors import FLOATS, same_bits, values_of

WINDOW = ([3, 3], [2, 2], [1, 1])


@pytest.fixture(autouse=True)
def not_asked_yet():
    signed_zero._ask.cache_clear()


def _inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = values_of(4096, dtype, 1, 0.2, False)
    x[::5] = -0.0
    return x.cuda(), x[:2048].view(2, 4, 16, 16).cuda()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_answer_is_what_relu_gives(dtype):
    x = torch.tensor([-0.0], dtype=dtype, device="cuda")
    assert relu_keeps_negative_zero(x) is bool(torch.relu(x).signbit())
    assert relu_keeps_negative_zero(x) is bool(torch.relu_(x.clone()).signbit())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_asking_is_no_flagged_wait(dtype):
    x, image = _inputs(dtype)
    with no_synchronisation():
        y, _ = ops.relu_mask1(x)
        pooled, _ = ops.maxpool_forward(image, *WINDOW, False, True, True, 4)
    assert same_bits(y, torch.relu(x))
    assert same_bits(pooled, torch.nn.functional.max_pool2d(torch.relu(image), 3, 2, 1))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_captured_relu_is_pytorchs(dtype):
    x, image = _inputs(dtype)

    def run() -> tuple[torch.Tensor, ...]:
        z = x.clone()
        return *ops.relu_mask1(x), ops.relu_mask1_(z), z, *ops.maxpool_forward(image, *WINDOW, False, True, True, 4)

    expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(captured, expected, strict=True))
    assert same_bits(captured[0], torch.relu(x)) and same_bits(captured[3], captured[0])


def test_a_capture_that_begins_before_the_first_relu_is_refused():
    x, _ = _inputs(torch.float32)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(RuntimeError, match="run one step before the capture"):
            ops.relu_mask1(x)
        x.clone()
    assert same_bits(ops.relu_mask1(x)[0], torch.relu(x))
