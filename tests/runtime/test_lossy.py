"""Delayed precision reduction: the forward is plain PyTorch's, masks and maps stay exact, values keep their bound."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.grad import conv2d_weight

import gistkit
from gistkit.codecs import CODECS
from gistkit.formats import INT_FORMS, LOSSY_FORMS
from gistkit.runtime.stash.verify import same_bits
from tests.support.bounds import error_bound
from tests.support.models import convolutions
from tests.support.training import batches


def step(model, x, t):
    torch.manual_seed(3)
    loss = F.cross_entropy(model(x), t)
    loss.backward()
    return loss, {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("lossy", LOSSY_FORMS)
def test_only_weight_gradients_feel_it_in_a_network_without_batch_norm(lossy):
    plain = convolutions()
    twin = gistkit.compress(copy.deepcopy(plain), lossy=lossy)
    x, t = batches(1, 4, 32)[0]
    (loss, want), (loss_now, got) = step(plain, x, t), step(twin, x, t)
    assert same_bits(loss, loss_now)
    changed = 0
    for name, grad in want.items():
        if name.endswith("bias"):  # activation gradients pass masks, maps and weights, none of which is narrowed
            assert same_bits(grad, got[name]), name
        else:
            changed += not torch.equal(grad, got[name])
    assert changed >= 3


@pytest.mark.parametrize("lossy", LOSSY_FORMS)
def test_a_weight_gradient_is_off_by_no_more_than_its_kept_input(lossy):
    plain = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1, bias=False))
    twin = gistkit.compress(copy.deepcopy(plain), lossy=lossy)
    x, grad = torch.randn(4, 3, 32, 32), torch.randn(4, 8, 32, 32)
    plain(x).backward(grad)
    twin(x).backward(grad)
    want, got = plain[2].weight.grad, twin[2].weight.grad
    kept = torch.relu(plain[0](x)).detach()
    row = next(r for r in gistkit.report(twin).stats.rows if r.op == "relu" and r.plain_bytes)
    assert row.codec == lossy if lossy in INT_FORMS else row.codec.endswith("+" + lossy)
    error = error_bound(CODECS[row.codec], kept)
    # The gradient is linear in the kept input: the error of each element times |grad|, summed. Both sums have n terms
    # and are off by at most n eps times the sum of their magnitudes (Higham, eq. 4.4), the kept one grown by its error.
    terms, eps = grad[:, 0].numel(), torch.finfo(torch.float32).eps
    bound = conv2d_weight(
        error + 2 * terms * eps * (kept.double().abs() + error), want.shape, grad.double().abs(), padding=1
    )
    assert ((want - got).abs() <= bound).all()
    assert not torch.equal(want, got)


@pytest.mark.parametrize("lossy", INT_FORMS)
def test_plans_and_tensors_without_a_plan_take_integers(lossy):
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(16, 10, 32))
    loss = lambda y, t: F.cross_entropy(y.flatten(1), t)  # noqa: E731
    x, t = batches(1, 4, 32)[0]
    plan = gistkit.plan(model, x, t, loss_fn=loss, lossy=lossy, policy="gist")
    assert gistkit.Plan.from_json(plan.to_json()) == plan and lossy in {d.codec for d in plan.decisions}
    torch.manual_seed(3)
    want = loss(model(x), t)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    torch.manual_seed(3)
    assert same_bits(loss(twin(x), t), want)
    assert lossy in str(gistkit.report(twin))
    weights = [torch.randn(256, 256, requires_grad=True) for _ in range(3)]
    with gistkit.saving(lossy=lossy) as saved:
        y = F.linear(F.linear(F.linear(torch.randn(64, 256), weights[0]).relu(), weights[1]), weights[2])
    y.sum().backward()
    assert {"zvc", lossy} <= {row.codec for row in saved.stats.rows}  # of a ReLU's output every bit, as there are zeros


class GatedHidden(nn.Module):
    """SwiGLU: both halves of one storage are saved, and between them a result of their shape."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 256), nn.Linear(128, 16)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


def test_halves_of_one_storage_do_not_take_the_turn_of_a_rounded_result():
    model, x = gistkit.compress(nn.Sequential(GatedHidden(), GatedHidden()), lossy="fp8s"), torch.randn(64, 16)
    kept_bytes = set()
    for _ in range(4):  # two of them interposed on as a whole
        with gistkit.LiveBytes() as live:
            y = model(x)
            kept_bytes.add(live.current_bytes - y.nbytes + x.nbytes)
        y.sum().backward()
        kept_bytes.add(gistkit.report(model).kept_bytes)
    assert len(kept_bytes) == 1
