"""What every op's backward node does with its hold: one use, retained graphs, other threads, double backward."""

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gistkit import functional
from tests.support.nn_cases import planted, same_bits

WEIGHT = planted((4, 3, 3, 3), special=False).requires_grad_()
MATRIX = planted((5, 8), special=False).requires_grad_()

OPS = {
    "relu": (functional.relu, F.relu),
    "relu in place": (lambda x: functional.relu(x * 1, True), lambda x: F.relu(x * 1, True)),
    "relu kept": (lambda x: functional.relu(x, keep=functional.keep_coded("mask1")), F.relu),
    "relu kept in place": (lambda x: functional.relu(x * 1, True, keep=functional.keep_dense), F.relu),
    "max_pool2d": (lambda x: functional.max_pool2d(x, 2), lambda x: F.max_pool2d(x, 2)),
    "relu_max_pool2d": (lambda x: functional.relu_max_pool2d(x, 2), lambda x: F.max_pool2d(F.relu(x), 2)),
    "conv2d": (lambda x: functional.conv2d(x, WEIGHT), lambda x: F.conv2d(x, WEIGHT)),
    "linear": (lambda x: functional.linear(x, MATRIX), lambda x: F.linear(x, MATRIX)),
    "dropout": (functional.dropout, F.dropout),
}


@pytest.fixture(params=OPS)
def ops(request):
    return OPS[request.param]


def _input():
    return planted((2, 3, 8, 8), special=False).requires_grad_()


def test_second_backward_raises_pytorchs_error(ops):
    x = _input()
    messages = []
    for f in ops:
        y = f(x)
        grad = torch.ones_like(y)
        y.backward(grad)
        with pytest.raises(RuntimeError) as error:
            y.backward(grad)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert "Trying to backward through the graph a second time" in messages[0]


def test_the_hold_goes_with_its_use(ops):
    x = _input()
    y = ops[0](x)
    node = y.grad_fn if hasattr(y.grad_fn, "kept") else y.grad_fn.next_functions[0][0]  # behind a view
    kept = node.kept
    hold = weakref.ref(next(k for k in kept if k is not None) if isinstance(kept, tuple | list) else kept)
    del kept
    y.sum().backward(retain_graph=True)
    gc.collect()
    assert hold() is not None
    y.sum().backward()
    gc.collect()
    assert node.kept is None and hold() is None


def test_retained_graphs_and_accumulation(ops):
    results = []
    for f in ops:
        torch.manual_seed(3)
        x = planted((2, 3, 8, 8), special=False).requires_grad_()
        y = f(x)
        y.pow(2).sum().backward(retain_graph=True)
        first = x.grad.clone()
        y.pow(2).sum().backward(retain_graph=True)
        f(x).sum().backward()
        y.pow(2).sum().backward()
        results.append((first, x.grad))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(*results[0])


def test_backward_from_another_thread(ops):
    gradients = []
    for f in ops:
        torch.manual_seed(3)
        x = _input()
        loss = f(x).pow(2).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        gradients.append(x.grad)
    assert same_bits(*gradients)


def test_double_backward_raises_a_clear_error(ops):
    x = _input()
    (grad,) = torch.autograd.grad(ops[0](x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiate twice through an operation of gistkit.*once_differ"):
        grad.sum().backward()


def test_a_branch_without_gradient(ops):
    """An op whose output is used only where autograd has no gradient for it: none comes out, and nothing breaks."""

    class Detour(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, x):
            ctx.set_materialize_grads(False)
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return None, grad

    x = _input()
    Detour.apply(ops[0](x), x).sum().backward()
    assert same_bits(x.grad, torch.ones_like(x))


def test_function_transforms_take_pytorchs_path(ops):
    x = planted((2, 3, 8, 8), special=False)
    own, plain = ops
    torch.manual_seed(5)
    got = torch.func.grad(lambda t: own(t).pow(2).sum())(x)
    torch.manual_seed(5)
    assert torch.equal(got, torch.func.grad(lambda t: plain(t).pow(2).sum())(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode_takes_pytorchs_path():
    x = _input()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(functional.relu(dual)).tangent
    assert torch.equal(tangent, (x > 0).float())


def test_checkpoints_still_drop_what_is_kept_whole():
    def block(f, x):
        return f.relu(f.batch_norm(f.conv2d(x, WEIGHT, padding=1), None, None, training=True))

    def step(f):
        x = planted((2, 3, 8, 8), special=False).requires_grad_()
        y = checkpoint(lambda t: f.linear(block(f, t), MATRIX), x, use_reentrant=False)
        y.pow(2).sum().backward()
        return x.grad

    torch.manual_seed(0)
    got = step(functional)
    torch.manual_seed(0)
    assert same_bits(got, step(F))
    x = _input()
    y = checkpoint(lambda t: block(functional, t), x, use_reentrant=False)
    norm = y.grad_fn.next_functions[0][0]
    assert not hasattr(norm, "kept") and not hasattr(norm.next_functions[0][0], "kept")


def test_subclasses_take_pytorchs_path():
    class Tagged(torch.Tensor):
        pass

    x = planted((1, 3, 8, 8), special=False).as_subclass(Tagged).requires_grad_()
    for own, _ in OPS.values():
        y = own(x)
        assert type(y) is Tagged and not hasattr(y.grad_fn, "kept")


def test_fake_tensors_have_the_real_geometry(ops):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def strides(x, f):
        y = f(x)
        y.sum().backward()
        return y.shape, y.stride(), x.grad.shape, x.grad.stride()

    x = _input().detach().contiguous(memory_format=torch.channels_last)
    real = strides(x.clone().requires_grad_(), ops[1])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = strides(mode.from_tensor(x).requires_grad_(), ops[0])
    assert fake == real
