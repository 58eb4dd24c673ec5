"""cuDNN's engine plans by name, over a stand-in for the package: what is listed, what runs, what is said where not."""

import itertools
import sys
from contextlib import contextmanager

import pytest
import torch

from gistkit.kernels import conv_task, cudnn_convolutions, engines, run_engine_plan
from tests.support import fake_cudnn

PARTS = ("forward", "weight", "input")
CPU = torch.device("cpu")


@pytest.fixture
def ran(monkeypatch):
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield fake_cudnn.installed(monkeypatch, fake_cudnn)


def task(part, x=(4, 6, 10, 9), weight=(8, 3, 3, 2), options=((2, 1), (1, 2), (1, 2)), dtype=torch.float32, last=False):
    return conv_task(part, x, weight, options, dtype, CPU, last)


def names(found):
    return [plan.name for plan in found]


@pytest.mark.parametrize("part", PARTS)
def test_what_pytorch_or_the_class_leaves_out_is_not_listed(ran, part):
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True), _deterministic(False):
        assert names(engines(task(part))) == ["engine9", "engine7", "engine20", "engine0"]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), _deterministic(False):
        assert names(engines(task(part))) == ["engine7", "engine20", "engine0"]
        assert "engine9" in names(engines(task(part, dtype=torch.bfloat16)))  # tensor cores are no TF32 there
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False, deterministic=True), _deterministic(False):
        assert names(engines(task(part))) == ["engine7", "engine0"]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), _deterministic(True):
        assert names(engines(task(part))) == ["engine7", "engine0"]


@contextmanager
def _deterministic(on):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("groups", (1, 2))
@pytest.mark.parametrize("last", (False, True))
def test_every_plan_gives_pytorchs_result(ran, last, groups):
    layout = torch.channels_last if last else torch.contiguous_format
    options = ((2, 1), (1, 2), (1, 2))
    x = torch.randn(4, 6, 10, 9).contiguous(memory_format=layout)
    weight = torch.randn(8, 6 // groups, 3, 2).contiguous(memory_format=layout)
    y = torch.conv2d(x, weight, None, *options, groups)
    dy = torch.randn_like(y)
    mask = [True, True, False]
    dx, dw, _ = torch.ops.aten.convolution_backward(dy, x, weight, None, *options, False, [0, 0], groups, mask)
    operands = {"forward": (x, weight, y), "weight": (x, dy, dw), "input": (dy, weight, dx)}
    for part, (first, second, expected) in operands.items():
        one = task(part, x.shape, weight.shape, options, last=last)
        assert one.y == y.shape
        for plan in engines(one):
            result = run_engine_plan(one, plan.name, first, second)
            assert result.is_contiguous(memory_format=layout)
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert {part for part, _ in ran} == set(PARTS)


def test_workspace_is_what_the_plan_says_and_operands_of_other_formats_are_copied(ran):
    one = task("forward")
    assert [p.workspace_bytes for p in engines(one)] == [4 * 4 * 6 * 10 * 9, 0]
    shifted = torch.randn(4 * 6 * 10 * 9 + 1)[1:].view(4, 6, 10, 9)  # begins at no multiple of 16 bytes
    last = torch.randn(8, 3, 3, 2).contiguous(memory_format=torch.channels_last)
    result = run_engine_plan(one, "engine7", shifted, last)
    torch.testing.assert_close(result, torch.conv2d(shifted, last, None, (2, 1), (1, 2), (1, 2), 2))


def test_an_engine_is_the_first_of_its_plans(ran):
    one, x, weight = task("forward"), torch.randn(4, 6, 10, 9), torch.randn(8, 3, 3, 2)
    run_engine_plan(one, "engine7", x, weight)
    assert ran == [("forward", "eng7_k2=1_k13=0")]


def test_an_unknown_name_is_refused_with_what_there_is(ran):
    with pytest.raises(
        ValueError, match=r"no 'engine3' for the input of a convolution .* has engine7, engine0: plan again"
    ):
        run_engine_plan(task("input"), "engine3", torch.randn(4, 8, 5, 11), torch.randn(8, 3, 3, 2))


@pytest.mark.parametrize(
    "wrong", ({"dtype": torch.float64}, {"x": (2**24, 6, 10, 9)}, {"device": torch.device("meta")})
)
def test_what_is_not_taken_has_no_plans(ran, wrong):
    given = {"x": (4, 6, 10, 9), "dtype": torch.float32, "device": CPU} | wrong
    one = conv_task("forward", given["x"], (8, 6, 3, 3), ((1, 1),) * 3, given["dtype"], given["device"], False)
    assert engines(one) == ()


def test_a_task_without_a_graph_has_no_plans(ran, monkeypatch):
    def refuses(_):
        raise fake_cudnn.cudnnGraphNotSupportedError("no")

    monkeypatch.setattr(fake_cudnn.pygraph, "validate", refuses)
    assert engines(task("forward")) == ()
    with pytest.raises(ValueError, match="it has none"):
        run_engine_plan(task("forward"), "engine0", torch.randn(4, 6, 10, 9), torch.randn(8, 3, 3, 2))


def test_graphs_are_built_once_a_thread(ran, monkeypatch):
    built = []
    build = fake_cudnn.pygraph.build_operation_graph
    monkeypatch.setattr(fake_cudnn.pygraph, "build_operation_graph", lambda self: (built.append(1), build(self)))
    for _, part in itertools.product(range(3), PARTS):
        engines(task(part))
    assert len(built) == 3


def test_without_the_package_the_error_names_it(monkeypatch):
    monkeypatch.setattr(cudnn_convolutions, "find_spec", lambda name: None)
    monkeypatch.setattr(cudnn_convolutions, "DEVICES", ("cpu",))
    monkeypatch.setattr(cudnn_convolutions, "_LOCAL", cudnn_convolutions._Local())
    cudnn_convolutions.engines_missing.cache_clear()
    try:
        assert "cudnn" not in sys.modules
        with pytest.raises(RuntimeError, match=r"nvidia-cudnn-frontend is not installed; pip install gistkit\[cudnn\]"):
            engines(task("forward"))
    finally:
        cudnn_convolutions.engines_missing.cache_clear()
