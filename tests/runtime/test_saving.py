"""gistkit.saving: encodings around any region of code, without a model or a plan."""

import pytest
import torch
import torch.nn.functional as F

import gistkit
from gistkit.errors import CompressError
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.stash.verify import same_bits


def network(w, v, x):
    y = F.max_pool2d(F.relu(F.conv2d(x, w, padding=1)), 2)
    y = F.relu(F.conv2d(y, v, padding=1))
    return F.conv2d(y, v, padding=1).relu().sum()


def operands():
    torch.manual_seed(0)
    w, v = torch.randn(16, 3, 3, 3), torch.randn(16, 16, 3, 3)
    return w.requires_grad_(), v.requires_grad_(), torch.randn(4, 3, 32, 32)


def test_same_bits_in_less_memory():
    w, v, x = operands()
    with LiveBytes() as plain_live:
        loss = network(w, v, x)
        plain_kept = plain_live.current_bytes
    want = torch.autograd.grad(loss, (w, v))
    with LiveBytes() as live:
        with gistkit.saving() as saved:
            loss_now = network(w, v, x)
        kept = live.current_bytes
    got = torch.autograd.grad(loss_now, (w, v))
    assert same_bits(loss, loss_now)
    assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))
    assert kept < plain_kept / 2
    assert saved.stats.plain_bytes is None
    assert abs(saved.stats.kept_bytes - x.numel() * x.element_size() - kept) <= 64


def test_lossy_needs_a_known_format():
    w, v, x = operands()
    with gistkit.saving(lossy="fp8") as saved:
        network(w, v, x).backward()
    assert any(r.codec == "zvc+fp8" for r in saved.stats.rows)
    with pytest.raises(ValueError, match='lossy="fp7"'), gistkit.saving(lossy="fp7"):
        pass


def test_backward_inside_and_blocks_that_do_not_nest():
    w, v, x = operands()
    with gistkit.saving():
        network(w, v, x).backward()
        with pytest.raises(CompressError, match="saving: other saved-tensor hooks are active here"), gistkit.saving():
            pass
    assert w.grad is not None


def test_an_exception_leaves_nothing():
    w, v, x = operands()
    with LiveBytes() as live:
        with pytest.raises(KeyError), gistkit.saving():
            network(w, v, x)
            raise KeyError
        assert live.current_bytes == 0
