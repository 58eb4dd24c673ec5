"""Plans are captured with the CPU's operators: steps whose operators do otherwise on a GPU have plain's bits."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend

import gistkit
from gistkit.capture.mirrored import _has_fused_kernel
from gistkit.capture.step.cuda_scratch import partial_bytes, scratch_bytes
from tests.runtime.recompute.test_other_operators import attentions, norms, steps
from tests.support.graphs import Apply


def resizes():
    """Sums of a map and a resized one, which autocast makes fp32 on a GPU."""

    def forward(m, x):
        for down, up in zip(m[0:6:2], m[1:6:2], strict=True):
            x = F.relu(up(x + F.interpolate(F.relu(down(F.max_pool2d(x, 2))), scale_factor=2)))
        return m[6](x.mean((2, 3)))

    convs = [nn.Conv2d(16, 16, 3, padding=1) for _ in range(6)]
    return Apply(forward, *convs, nn.Linear(16, 4)), torch.randn(8, 16, 16, 16), torch.randint(4, (8,))


@pytest.mark.parametrize(("made", "narrow"), [(norms, False), (norms, True), (attentions, False), (resizes, True)])
def test_reruns_of_what_a_gpu_makes_otherwise(made, narrow):
    torch.manual_seed(0)
    model, x, y = made()
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    plain = copy.deepcopy(model)
    with torch.autocast("cuda", torch.bfloat16, enabled=narrow):
        plan = gistkit.plan(model, x, y, loss_fn=F.cross_entropy, policy="checkpoint", measure=False)
        expected = steps(plain, x, y, lambda m, x, y: F.cross_entropy(m(x), y).backward())
        gistkit.compress(model, plan)
        found = steps(model, x, y, lambda m, x, y: gistkit.step(m, F.cross_entropy, x, y))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    reasons = {row.reason for row in gistkit.report(model).stats.rows}
    copied = any("as a copy that an operator makes for itself" in reason for reason in reasons)
    assert made is attentions or not copied, reasons  # the others' copies are in the plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_kernels_of_attentions_are_those_that_captures_take_for_cudas(dtype):
    """Which attentions keep their probabilities, by heads, widths and masks; torch 2.11 on an H200."""
    words = {"device": "cuda", "dtype": dtype, "requires_grad": True}
    other = []
    masks = ("none", "causal", "bool", "grad", "columns", "one column")
    for heads, width, mask in itertools.product((4, 2), (64, 6, 20, 24, 72, 256, 320), masks):
        query, key = torch.randn(2, 4, 64, width, **words), torch.randn(2, heads, 64, width, **words)
        bias = torch.zeros(64, 64, **words)
        given = {"bool": bias > -1, "grad": bias, "columns": bias.mT, "one column": bias[:, :1].expand(64, 64)}
        chosen = query, key, key, given.get(mask)
        kernel = torch._fused_sdp_choice(*chosen, 0.0, mask == "causal", enable_gqa=heads < 4)
        if (kernel != SDPBackend.MATH.value) != _has_fused_kernel(*chosen, heads < 4):
            other.append((heads, width, mask, kernel))
    by_columns = torch.randn(2, 4, 64, 64, **words).mT
    for chosen in itertools.product((by_columns, query := by_columns.contiguous()), repeat=3):
        kernel = torch._fused_sdp_choice(*chosen)
        if (kernel != SDPBackend.MATH.value) != _has_fused_kernel(*chosen, None, False):
            other.append((tuple(t is query for t in chosen), kernel))
    assert not other


def test_sums_hold_what_captures_take_for_their_partial_results():
    words, other = {"device": "cuda"}, []
    shapes = (((16384, 768), [0]), ((16, 1024, 3072), [1]), ((1 << 20, 24), [0]), ((64, 128, 31, 7), [1, 2]))
    last = ((64, 56, 56, 64), [0, 1, 2]), ((512, 1000), [0]), ((4096, 4096), [1]), ((64, 64, 32, 32), [0, 2, 3])
    for (shape, dims), dtype in itertools.product((*shapes, *last), (torch.float32, torch.bfloat16)):
        x = torch.ones(shape, dtype=dtype, **words)
        for op in (torch.ops.aten.sum.dim_IntList, torch.ops.aten.mean.dim):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = op(x, dims, True)
            found = torch.cuda.max_memory_allocated() - before - out.untyped_storage().nbytes()
            expected = partial_bytes(op, (x, dims, True), out)
            if abs(found - expected) > 16 << 10:  # counters
                other.append((shape, dims, dtype, op, found, expected))
    assert not other


@pytest.mark.parametrize("deterministic", [False, True])
def test_operators_hold_inside_what_captures_take(deterministic):
    def made(op, *args):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = op(*args)
        found = torch.cuda.max_memory_allocated() - before
        return found - out.untyped_storage().nbytes(), scratch_bytes(op, args, out)

    rows, source = torch.randint(0, 500, (1 << 18,), device="cuda"), torch.randn(1 << 18, 8, device="cuda")
    zeros, places = torch.zeros(500, 8, device="cuda"), rows[:, None].expand(-1, 8)
    near = torch.randint(0, 125, (1, 1 << 16, 8), device="cuda")
    aten, before = torch.ops.aten, torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        found = [
            made(aten.index_put.default, zeros, [rows], source, True),
            made(aten.embedding_dense_backward.default, source, rows, 500, -1, False),
            made(aten.scatter_add.default, zeros, 0, places, source),
            made(aten.scatter_add.default, zeros, 0, places.contiguous(), source),
            made(aten.scatter_add.default, zeros.view(4, 125, 8), 1, near.expand(4, -1, -1), source.view(4, -1, 8)),
            made(aten._softmax_backward_data.default, source, source, -1, torch.float32),
        ]
    finally:
        torch.use_deterministic_algorithms(before)
    assert [expected > 0 for _, expected in found] == [True, True, *[deterministic] * 3, True]
    assert all(abs(held - expected) <= 0.02 * expected + (64 << 10) for held, expected in found), found


def test_an_operator_that_holds_more_inside_than_a_capture_knows_is_told():
    """A flat sort took 32 bytes for a value of fp32 on an H200, of which a capture knows 12: values and indices."""
    parts = nn.Linear(1024, 8192), nn.Linear(8192, 4)
    model = Apply(lambda m, x: m[1](m[0](x).flatten().sort()[0].view(-1, 8192)), *parts).cuda()
    x, y = torch.randn(4096, 1024, device="cuda"), torch.randint(4, (4096,), device="cuda")
    plan = gistkit.plan(model, x, y, loss_fn=F.cross_entropy, budget="105%", measure=False)
    gistkit.compress(model, plan)
    torch.cuda.empty_cache()
    F.cross_entropy(model(x), y).backward()
    torch.cuda.reset_peak_memory_stats()
    with pytest.warns(gistkit.BudgetWarning, match=f"the budget of {plan.budget_bytes} bytes is exceeded"):
        F.cross_entropy(model(x), y).backward()
