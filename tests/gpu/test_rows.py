"""A scale for each row of what a layer norm reads, in the kernels that Inductor writes: gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit

pytestmark = pytest.mark.gpu


class Mlp(nn.Module):
    """The second half of a transformer's block."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def gradients(model, x, compiler):
    torch._dynamo.reset()
    model.zero_grad()
    compiled = compiler(model)
    with torch.autocast("cuda", torch.bfloat16):
        loss = compiled(x).float().square().mean()
    loss.backward()
    report = gistkit.report(compiled) if compiler is not torch.compile else None
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())], report


@pytest.mark.parametrize("width", [640, 768])
def test_gradients_with_a_scale_for_each_row(width):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, width), Mlp(width), Mlp(width), nn.LayerNorm(width), nn.Linear(width, 16)
    ).cuda()
    x = torch.randn(64, 200, 32, device="cuda")
    plain, _ = gradients(model, x, torch.compile)
    ours, report = gradients(model, x, lambda m: gistkit.compile(m, lossy="fp8s"))
    forms = [row.form for row in report.rows]
    assert "fp8s_row" in forms and "fp8s" in forms
    torch.testing.assert_close(
        ours[0], plain[0], rtol=1e-3, atol=0
    )  # forward is exact but for other kernels' roundings
    errors = [((a - b).norm() / a.norm()).item() for a, b in zip(plain[1:], ours[1:], strict=True)]
    assert 0 < max(errors) < 0.06  # 3 bits of mantissa: 2**-4 at most an element
