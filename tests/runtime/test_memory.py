"""Memory claims, measured: bytes kept after the forward and the peak of live bytes over a step, against eager."""

import copy

import pytest
import torch
import torch.nn.functional as F

import gistkit
from gistkit import zoo
from gistkit.runtime.live import LiveBytes


def measure(model, x, t, steps=1):
    """(bytes kept after forward, peak bytes) of a step, gradients of the parameters and what was there before left out.

    The step before is a warm-up: densities are learnt, gradient buffers exist.
    """
    for _ in range(steps):
        F.cross_entropy(model(x), t).backward()
    with LiveBytes(timeline=False) as live:
        loss = F.cross_entropy(model(x), t)
        live.mark("forward end")
        kept = live.current_bytes
        loss.backward()
    return kept, live.peak_bytes


def ratios(name, size, batch, lossy=None):
    torch.manual_seed(0)
    plain = zoo.MODELS[name](num_classes=10, image_size=size)
    twin = gistkit.compress(copy.deepcopy(plain), lossy=lossy)
    x, t = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
    (kept, peak), (kept_now, peak_now) = measure(plain, x, t), measure(twin, x, t)
    report = gistkit.report(twin).stats
    # The report counts the batch, which was there before; it misses the loss's own few tensors (log-softmax, logits).
    assert 0 <= kept_now + x.numel() * 4 - report.kept_bytes <= 4 * batch * 10 * 4 + 1024
    return kept / kept_now, peak / peak_now


@pytest.mark.parametrize(
    ("name", "lossy", "kept_least", "peak_least"),
    [
        ("vgg16", None, 3.0, 1.7),
        ("resnet50", "fp8s", 5.0, 1.3),
    ],
)
def test_kept_and_peak_bytes_against_eager(name, lossy, kept_least, peak_least):
    kept, peak = ratios(name, {"vgg16": 64, "resnet50": 32}[name], 4, lossy)
    print(f"{name} {lossy}: kept {kept:.2f}x, peak {peak:.2f}x")
    assert kept >= kept_least
    assert peak >= peak_least
