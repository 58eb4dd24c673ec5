"""Engines of cuDNN on a card: every plan that is listed against PyTorch's own result, its workspace, and plans that run
VGG-16's second convolution with less workspace than PyTorch takes. What a name of the package's gets wrong is raised as
it is; run with ``-s`` for the figures."""

import importlib.util

import pytest
import torch
from torch import nn

import gistkit
from bench.algorithms import pytorchs
from gistkit.kernels import conv_task, engines, engines_missing, run_engine_plan

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cudnn") is None, reason="needs gistkit[cudnn]")
MIB = 2**20
PARTS = ("forward", "weight", "input")
CASES = {  # x, weight, stride, padding, dilation, groups
    "vgg16": ((16, 64, 224, 224), (64, 64, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "strided": ((8, 32, 33, 41), (64, 32, 3, 5), (2, 1), (1, 2), (1, 1), 1),
    "grouped": ((8, 32, 28, 28), (64, 8, 3, 3), (1, 1), (2, 2), (2, 2), 4),
    "pointwise": ((8, 64, 14, 14), (256, 64, 1, 1), (1, 1), (0, 0), (1, 1), 1),
}
# Shares of the largest value. In fp32 sums of up to 16 * 224 * 224 products: each addition is off by up to 2^-24 of it,
# so the error is a random walk of as many steps; four deviations, as 36,864 sums are compared. TF32 rounds the
# operands to 11 bits, in some engines and not in others; bf16 rounds the result to 8.
TOLERANCE = {"fp32": 4 * (16 * 224 * 224) ** 0.5 * 2**-24, "tf32": 2e-3, "bf16": 2e-2}


@pytest.fixture(params=TOLERANCE)
def precision(request):
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=request.param == "tf32"):
        yield request.param


def operands_of(case, precision, last=False):
    x, weight, *options, groups = CASES[case]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    layout = torch.channels_last if last else torch.contiguous_format
    torch.manual_seed(0)

    def made(*shape):
        return torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=layout)

    task = conv_task("forward", x, weight, tuple(options), dtype, torch.device("cuda", 0), last)
    return made(*x), made(*weight), made(*task.y), tuple(options), groups


def test_the_package_can_be_used_here():
    assert engines_missing() == ""
    import cudnn

    versions = cudnn.__version__, cudnn.backend_version_string(), torch.backends.cudnn.version()
    print("\nfrontend {}, cuDNN {}, PyTorch's {}".format(*versions))


@pytest.mark.parametrize("last", (False, True))
@pytest.mark.parametrize("case", CASES)
def test_every_plan_gives_pytorchs_result_in_its_workspace(case, last, precision):
    x, weight, dy, options, groups = operands_of(case, precision, last)
    for part in PARTS:
        task = conv_task(part, x.shape, weight.shape, options, x.dtype, x.device, last)
        pair = {"forward": (x, weight), "weight": (x, dy), "input": (dy, weight)}[part]
        expected = pytorchs(task, x, weight, dy, groups)()
        found = engines(task)
        assert found
        for plan in found:
            run_engine_plan(task, plan.name, *pair)  # builds
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            result = run_engine_plan(task, plan.name, *pair)
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated() - before
            used = torch.cuda.max_memory_allocated() - before - held
            # the allocator's blocks are up to 1 MiB larger than asked for, of the result as of the workspace
            assert abs(used - plan.workspace_bytes) <= 2 * MIB, (part, plan, used)
            assert result.stride() == expected.stride() or min(result.shape) == 1
            worst = (result.float() - expected.float()).abs().max() / expected.abs().max().float()
            assert worst.item() <= TOLERANCE[precision], (part, plan, worst.item())
            del result


@pytest.mark.parametrize("batch", (16, 64))
def test_vgg16s_second_convolution_has_engines_of_far_less_workspace(batch, precision):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    shape = (batch, 64, 224, 224), (64, 64, 3, 3)
    map_bytes = batch * 64 * 224 * 224 * dtype.itemsize
    for part in PARTS:
        task = conv_task(part, *shape, ((1, 1),) * 3, dtype, torch.device("cuda", 0), False)
        found = engines(task)
        print(f"\n{precision} {batch} {part}:", ", ".join(f"{e.name} {e.workspace_bytes / MIB:.1f}" for e in found))
        assert min(e.workspace_bytes for e in found) < map_bytes / 100


def test_deterministic_algorithms_leave_out_those_that_are_not():
    shape, task = ((16, 64, 56, 56), (64, 64, 3, 3), ((1, 1),) * 3), {}
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        for strictly in (False, True):
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False, deterministic=strictly):
                task[strictly] = conv_task("weight", *shape, torch.float32, torch.device("cuda", 0), False)
    finally:
        torch.use_deterministic_algorithms(before)
    free, strict = ([p.name for p in engines(task[d])] for d in (False, True))
    assert set(strict) < set(free), (free, strict)
    x, dy = (torch.randn(16, 64, 56, 56, device="cuda") for _ in range(2))
    for name in strict:
        first, second = (run_engine_plan(task[True], name, x, dy) for _ in range(2))
        assert torch.equal(first, second), name


def network():
    """VGG-16's first block with batch norms, so that sub-batches are no way out."""
    torch.manual_seed(0)
    layers = []
    for channels in (3, 64):
        layers += [nn.Conv2d(channels, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    head = nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    return nn.Sequential(*layers, *head).cuda()


LOSS = nn.functional.cross_entropy


@pytest.fixture
def by_default():
    """PyTorch's choice of algorithms as users have it: deterministic ones may need no workspace in the first place."""
    torch._C._cuda_clearCublasWorkspaces()  # of other tests in this process, which no plan counts
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


def case(tf32, batch=64):
    """The model, its batch, times of it, a budget that PyTorch's own algorithms do not meet, PyTorch's gradients."""
    model, x = network(), torch.randn(batch, 3, 224, 224, device="cuda")
    targets = torch.arange(batch, device="cuda") % 10
    times = gistkit.measure(model, x, targets, loss_fn=LOSS)
    for task, known in times.engines.items():
        own = times.workspace_bytes[task] / MIB, 1e3 * times.seconds[task]
        shown = ", ".join(f"{a.name} {a.workspace_bytes / MIB:,.1f} MiB {1e3 * a.seconds:.2f} ms" for a in known)
        print(f"\ntask {task}: PyTorch {own[0]:,.1f} MiB {own[1]:.2f} ms; {shown}", end="")
    own_bytes = max(times.workspace_bytes.values())
    if own_bytes < 1024 * MIB:
        pytest.skip(f"PyTorch takes {own_bytes / MIB:,.0f} MiB of workspace at the most here: nothing to save")
    assert times.engines
    with pytest.raises(gistkit.BudgetError) as refused:
        gistkit.plan(model, x, targets, loss_fn=LOSS, measure=times, budget=MIB, fidelity="reassociated")
    least = refused.value.least_bytes
    print(f"\nleast bytes, MiB: { {name: n // MIB for name, n in least.items()} }")
    assert least["reassociated"] < least["bitwise"] - 512 * MIB
    LOSS(model(x), targets).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return model, x, targets, times, (least["bitwise"] + least["reassociated"]) // 2, expected


def compare(found, expected, tf32):
    """TF32 rounds products by 2**-11; some engines of a plan are fp32's where PyTorch's are not, so maxima and signs of
    single elements may fall otherwise."""
    for name, g in expected.items():
        worst = (found[name] - g).abs().max() / g.abs().max()
        if g.abs().max() > 1e-6:  # a bias before a batch norm has no gradient but rounding
            assert worst.item() <= (3e-2 if tf32 else 1e-3), (name, worst.item())


@pytest.mark.parametrize("tf32", (False, True))
@pytest.mark.parametrize("policy", ("optimal", "vdnn-all", "vdnn-dyn"))
def test_a_plan_takes_engines_under_a_budget_and_keeps_it(policy, tf32, by_default):
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        model, x, targets, times, budget, expected = case(tf32)
        words = {"loss_fn": LOSS, "measure": times, "fidelity": "reassociated"}
        if policy != "optimal":  # what it offloads it fetches for one task after the other
            budget = max(budget, gistkit.plan(model, x, targets, policy="vdnn-all", **words).peak_bytes + 256 * MIB)
        plan = gistkit.plan(model, x, targets, policy=policy, budget=budget, **words)
        chosen = {c.covered: c.algorithm for c in plan.choices if "engine" in c.algorithm}
        print(f"{policy}, tf32={tf32}: budget {budget / MIB:,.0f} MiB, peak {plan.peak_bytes / MIB:,.0f}, "
              f"{1e3 * plan.step_s:.1f} ms (plain {1e3 * plan.prediction.plain_step_s:.1f}), {chosen}")  # fmt: skip
        assert plan.sub_batches == 1 and plan.fidelity == ("reassociated" if chosen else "bitwise")
        assert chosen or policy == "vdnn-dyn"  # which takes the fastest ones that fit
        gistkit.compress(model, plan)
        for _ in range(2):  # the first one builds
            model.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            LOSS(model(x), targets).backward()
            torch.cuda.synchronize()
        # beside the step PyTorch's gradients are there, which the plan does not know
        peak = torch.cuda.max_memory_allocated() - sum(g.numel() * g.element_size() for g in expected.values())
        text = str(gistkit.report(model))
        print(f"measured peak {peak / MIB:,.0f} MiB\n{text}")
        assert peak <= budget and ("by cuDNN's engines" in text) is bool(chosen)
        compare({name: p.grad for name, p in model.named_parameters()}, expected, tf32)
        gistkit.restore(model)


def test_engines_in_a_cuda_graph(by_default):
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        model, x, targets, times, budget, expected = case(True)
        words = {"loss_fn": LOSS, "measure": times, "fidelity": "reassociated", "cuda_graph": True}
        plan = gistkit.plan(model, x, targets, budget=budget + x.numel() * 4 + 64 * MIB, **words)
        assert any("engine" in c.algorithm for c in plan.choices)
        gistkit.compress(model, plan)
        step = gistkit.GraphedStep(model, LOSS)
        for _ in range(5):
            model.zero_grad(set_to_none=True)
            step(x, targets)
        assert step.graph_bytes
        compare({name: p.grad for name, p in model.named_parameters()}, expected, True)
        gistkit.restore(model)
