"""The arithmetic of a batch norm is found by drawn tensors, whatever the network's own data would suggest."""

import pytest
import torch
from torch import nn

import gistkit
from gistkit.nn import norm
from gistkit.planning.policies import gist
from gistkit.runtime.program.program import Program
from gistkit.runtime.rebuild import arithmetic
from gistkit.runtime.rebuild.arithmetic import Kind, arithmetics, probe_ahead


def kind(x, affine=torch.float32):
    return Kind(tuple(x.shape), x.stride(), x.dtype, x.device, affine, 1e-5)


def by_fused(x):
    (right,) = [c for c in norm.rebuild_candidates(x) if c.__name__ == "_fused"]
    return right


def forgets(x, mean, invstd, weight, bias):
    """Right for unit weights and zero biases, as a network begins with."""
    return norm._fused(x, mean, invstd, torch.ones_like(mean), torch.zeros_like(mean))


def rounds_twice(x, mean, invstd, weight, bias):
    """Right where the means are zero."""
    alpha = weight * invstd
    over = (1, -1) + (1,) * (x.dim() - 2)
    return torch.addcmul((bias - mean * alpha).view(over), x, alpha.view(over))


@pytest.mark.parametrize("wrong", [forgets, rounds_twice])
@pytest.mark.parametrize("shape", [(4, 16, 8, 8), (2, 3, 4), (6, 5)])
def test_what_fits_a_first_step_by_chance_is_not_relied_on(monkeypatch, wrong, shape):
    half = torch.randn(shape)
    x = torch.cat((half, -half))
    weight, bias = torch.ones(shape[1]), torch.zeros(shape[1])
    y, mean, invstd, _, _ = torch._batch_norm_impl_index(x, weight, bias, None, None, True, 0.1, 1e-5, False)
    assert torch.equal(wrong(x, mean, invstd, weight, bias), y)
    right = by_fused(x)
    monkeypatch.setattr(arithmetic, "rebuild_candidates", lambda x: [wrong, right])
    state = torch.get_rng_state()
    assert arithmetics({}, kind(x)) == [right]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_arithmetics_are_told_apart_by_few_elements_of_16_bits(dtype, monkeypatch):
    wrong = [c for c in norm.KERNEL_CANDIDATES if c.args[0] not in ("fused", "split")]
    monkeypatch.setattr(arithmetic, "rebuild_candidates", lambda x: [*wrong, norm._stepwise, norm._fused])
    assert arithmetics({}, kind(torch.empty(4, 8, 6, 6, dtype=dtype))) == [norm._fused]


def test_what_was_forgotten_is_found_again_before_a_forward():
    """The engine forgets all that it knows to be exact now and then; under a budget there is room ahead only."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 4, 3))
    x = torch.randn(4, 3, 20, 20)
    graph = gistkit.capture(model, (x,))
    program, verified = Program(graph, gist(graph)), {}
    assert program.norms()
    probe_ahead(verified, program, (x,), {})
    known = dict(verified)
    verified.clear()
    probe_ahead(verified, program, (x,), {})
    assert known.keys() == verified.keys() and len(known) == 2
    for layout in (torch.contiguous_format, torch.channels_last):
        met = torch.empty((4, 32, 18, 18), memory_format=layout)
        assert arithmetics(verified, kind(met)) and verified.keys() == known.keys()
