"""Comparison of an op with PyTorch's own: bits and strides of outputs, gradients and buffers, and the random state."""

from collections.abc import Callable, Sequence

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "channels_last", "permuted", "sliced", "expanded")
SPECIAL = (float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e-40, -1e-40, 6e-8, -6e-8)


def planted(shape: Sequence[int], dtype: torch.dtype = torch.float32, special: bool = True) -> torch.Tensor:
    """Normal values; with ``special``, about every fifth is NaN, infinite, a zero of either sign or subnormal."""
    x = torch.randn(tuple(shape))
    if special:
        at = torch.randint(len(SPECIAL), x.shape)
        x = torch.where(torch.rand(x.shape) < 0.2, torch.tensor(SPECIAL)[at], x)
    return x.to(dtype)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x (at least 2-D; 4-D for channels_last) in a layout of LAYOUTS, same values except ``expanded``."""
    if layout == "channels_last":
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "permuted":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "sliced":
        return torch.cat((x, x), dim=-1)[..., : x.shape[-1]]
    return x[:1].expand(x.shape) if layout == "expanded" else x


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None, nan_payloads: bool = True) -> bool:
    """Same shape, dtype, strides and bits (``nan_payloads``: those of NaN too); or both None."""
    if a is None or b is None:
        return a is b
    if (a.shape, a.dtype, a.stride()) != (b.shape, b.dtype, b.stride()):
        return False
    if not nan_payloads:
        a, b = (torch.where(t.isnan(), float("nan"), t) for t in (a.detach(), b.detach()))
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.detach().contiguous().view(words), b.detach().contiguous().view(words))


def _leaf(x: torch.Tensor | None, device: str) -> torch.Tensor | None:
    """A leaf with x's values, strides and need of a gradient."""
    if x is None:
        return None
    copy = x.detach() if 0 in x.stride() else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x.detach())
    return copy.to(device).requires_grad_(x.requires_grad)


def run(f: Callable, tensors: Sequence[torch.Tensor | None], grad_layout="contiguous", special=True, device="cpu"):
    """f over fresh leaves: output, the gradients of those that need one, the device's random state afterwards."""
    torch.manual_seed(11)
    leaves = [_leaf(x, device) for x in tensors]
    y = f(*leaves)
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    torch.manual_seed(12)
    grad = laid_out(planted(y.shape, y.dtype, special), grad_layout).to(device)
    needing = [x for x in leaves if x is not None and x.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, needing, grad, allow_unused=True), state]


def assert_same(
    own: Callable, plain: Callable, tensors: Sequence[torch.Tensor | None], nan_payloads: bool = True, **options
) -> None:
    """own and plain agree to the bit, gradients and random state included."""
    got, want = run(own, tensors, **options), run(plain, tensors, **options)
    names = ["output", *(f"gradient {i}" for i in range(len(want) - 2)), "random state"]
    wrong = [n for n, a, b in zip(names, got, want, strict=True) if not same_bits(a, b, nan_payloads or n == names[-1])]
    assert wrong == [], (wrong, [(x.shape, x.stride(), x.dtype) for x in tensors if x is not None])
