"""Whole modules that run anew in backward on a GPU: bits, budgets, CUDA graphs."""

import copy

import pytest
import torch
import torch.nn.functional as F

import gistkit
from gistkit.errors import PlanMismatchError
from gistkit.runtime.step import graphed
from tests.support.models import Blocks

pytestmark = [
    pytest.mark.gpu,
    # of so few tokens PyTorch's kernels repeat their bits
    pytest.mark.filterwarnings("ignore:.*ttention defaults to a non-deterministic algorithm:UserWarning"),
]


def images(seed):
    torch.manual_seed(seed)
    return torch.randn(256, 3, 16, 16, device="cuda"), torch.randint(10, (256,), device="cuda")


def gradients(model, step, some):
    model.zero_grad()
    torch.manual_seed(7)
    return [step(*some).clone(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", [{}, {"dropout": 0.2, "masked": True}])
def test_bits_and_budget(words, dtype):
    model = Blocks(**words).cuda()
    amp = torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16)

    def step(m, x, y):
        with amp:
            loss = F.cross_entropy(m(x), y)
        loss.backward()
        return loss.detach()

    with amp:
        plan = gistkit.plan(
            model, *images(0), loss_fn=F.cross_entropy, policy="blocks", budget="75%", measure=False, hold_output=False
        )
    assert plan.modules
    twin = gistkit.compress(copy.deepcopy(model), plan)
    for seed in range(3):
        some = images(seed)
        expected = gradients(model, lambda *s: step(model, *s), some)
        model.zero_grad()
        held = torch.cuda.memory_allocated() - sum(t.nbytes for t in (*twin.parameters(), *some))
        torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(7)
        loss = step(twin, *some)
        # the plan counts 64 MiB of the libraries
        assert torch.cuda.max_memory_allocated() - held <= plan.budget_bytes
        assert all(map(torch.equal, [loss, *(p.grad for p in twin.parameters())], expected))
        twin.zero_grad()
        del expected, loss, some


def test_in_a_cuda_graph():
    model, words = Blocks().cuda(), {"loss_fn": F.cross_entropy, "measure": False}
    plan = gistkit.plan(model, *images(0), policy="blocks", cuda_graph=True, **words)
    assert plan.modules
    twins = [gistkit.compress(copy.deepcopy(model), plan) for _ in range(2)]
    steps = (lambda x, y: gistkit.step(twins[0], F.cross_entropy, x, y)), gistkit.GraphedStep(twins[1], F.cross_entropy)
    for seed in range(graphed.WARM_UP + 3):
        found = [gradients(m, step, images(seed)) for m, step in zip(twins, steps, strict=True)]
        assert all(map(torch.equal, *found))


def test_a_cuda_graph_does_not_draw_anew():
    model = Blocks(dropout=0.2).cuda()
    plan = gistkit.plan(model, *images(0), loss_fn=F.cross_entropy, policy="blocks", measure=False)
    step = gistkit.GraphedStep(gistkit.compress(model, plan), F.cross_entropy)
    with pytest.raises(PlanMismatchError, match="random numbers"):
        for seed in range(graphed.WARM_UP + 2):
            step(*images(seed))
