"""Plans that name engines of cuDNN for convolutions: from measuring to the report, over a stand-in for the package."""

import math
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import gistkit
from gistkit import CallChoice, PlanError
from gistkit.kernels import cudnn_convolutions
from gistkit.planning.cost import Algorithm, hardware, of_part
from gistkit.profiling import engines as profiled
from gistkit.profiling import measure
from tests.support import fake_cudnn
from tests.support.models import convolutions

MIB = 2**20


@pytest.fixture
def ran(monkeypatch):
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield fake_cudnn.installed(monkeypatch, fake_cudnn)


@pytest.fixture
def card(monkeypatch):
    """PyTorch's own algorithms take 100 MiB in every task of a convolution, and in any memory format."""

    def workspace(graph, *_):
        return {t.index: 100 * MIB for t in graph.tasks if t.conv is not None}

    monkeypatch.setattr(measure, "_workspace_bytes", workspace)
    monkeypatch.setattr(measure, "channels_last_bytes", lambda *_: {})


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def step(model, x):
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    return {name: g.clone() for name, g in gradients(model).items()}


def planned(model, x, algorithm, **settings):
    """A plan with a convolution's choices set by hand: by covered call."""
    plan = gistkit.plan(model, x, policy="gist", **settings)
    choices = {c.covered: c for c in plan.choices}
    choices |= {covered: CallChoice(covered, "conv2d", algorithm=text) for covered, text in algorithm.items()}
    return replace(plan, choices=tuple(choices[c] for c in sorted(choices)), fidelity="reassociated")


def plain_and_planned(model, x, plan):
    """The gradients of a step without the plan, and of one under it."""
    expected = step(model, x)
    gistkit.compress(model, plan)
    return expected, step(model, x)


def sgd_step(model, x):
    model.zero_grad(set_to_none=True)
    gistkit.step(model, lambda y, t: (y - t).square().mean(), x, torch.zeros(len(x), 10))
    return {name: g.clone() for name, g in gradients(model).items()}


def network():
    torch.manual_seed(0)
    model = convolutions()
    model[-2] = nn.Identity()  # no dropout: steps are compared
    return model, torch.randn(4, 3, 32, 32)


LINKED = replace(hardware("cpu"), d2h_gbps=10.0, h2d_gbps=10.0, both_gbps=20.0)


@pytest.mark.parametrize("policy", ("optimal", "vdnn-all", "vdnn-conv", "vdnn-dyn", "vdnn+", "modnn"))
def test_from_measuring_to_the_report(ran, card, policy):
    model, x = network()
    loss_fn = lambda y, t: (y - t).square().mean()  # noqa: E731
    batch = (x, torch.zeros(len(x), 10))
    times = gistkit.measure(model, *batch, loss_fn=loss_fn)
    convs = [t for t in gistkit.capture(model, (x,), backward=True).tasks if t.conv is not None]
    assert len(times.engines) == len(convs)
    assert {a.name for known in times.engines.values() for a in known} <= {"engine7", "engine0"}
    assert all(known[-1].workspace_bytes == 0 for known in times.engines.values())
    # whatever this machine's load: each is faster than PyTorch's and takes nothing
    best = {t: (Algorithm("engine0", 0.9 * times.seconds[t], 0),) for t in times.engines}
    words = {"measure": replace(times, engines=best), "loss_fn": loss_fn, "hardware": LINKED}
    exact = gistkit.plan(model, *batch, **words)
    assert not any("engine" in c.algorithm for c in exact.choices) and exact.fidelity == "bitwise"
    assert exact.peak_bytes > 100 * MIB
    plan = gistkit.plan(model, *batch, policy=policy, budget=50 * MIB, fidelity="reassociated", **words)
    assert plan.peak_bytes <= 50 * MIB and plan.fidelity == "reassociated" and plan.step_s < exact.step_s
    assert type(plan).from_json(plan.to_json()) == plan
    named = [c.algorithm for c in plan.choices if "engine" in c.algorithm]
    assert len(named) == 7 and set(named) == {"engine0"}

    expected = sgd_step(model, x)
    gistkit.compress(model, plan)
    for _ in range(2):
        ran.clear()
        found = sgd_step(model, x)
        assert len(ran) == plan.sub_batches * len(convs) and {name for _, name in ran} == {"eng0"}
    assert all(torch.allclose(found[name], g, rtol=1e-4, atol=1e-6) for name, g in expected.items())
    text = str(gistkit.report(model))
    assert "0: by cuDNN's engines: forward engine0, weight engine0" in text
    gistkit.restore(model)


def test_optimal_takes_more_workspace_where_there_is_room(ran, card):
    model, x = network()
    times = gistkit.measure(model, x)
    s = times.seconds
    known = {t: (Algorithm("engine7", 0.5 * s[t], 30 * MIB), Algorithm("engine0", 2 * s[t], 0)) for t in times.engines}
    plans = [gistkit.plan(model, x, measure=replace(times, engines=known), budget=n * MIB, fidelity="reassociated")
             for n in (12, 36, 200)]  # fmt: skip
    assert [p.sub_batches for p in plans] == [1, 1, 1]
    names = [Counter(name for c in p.choices if c.algorithm for part in ("forward", "weight", "input")
                     if (name := of_part(c.algorithm, part))) for p in plans]  # fmt: skip
    assert set(names[0]) == {"engine0"} and set(names[2]) == {"engine7"}
    assert names[1]["engine7"] > 0
    assert plans[0].step_s > plans[1].step_s >= plans[2].step_s
    gistkit.compress(model, plans[1])
    step(model, x)
    assert {name for _, name in ran} >= {"eng7_k2=1_k13=0"}


def test_a_budget_that_only_engines_meet_is_refused_to_bitwise_moves(ran, card):
    model, x = convolutions(), torch.randn(4, 3, 32, 32)
    times = gistkit.measure(model, x)
    with pytest.raises(gistkit.BudgetError) as refused:
        gistkit.plan(model, x, measure=times, budget=50 * MIB)
    least = refused.value.least_bytes
    assert least["bitwise"] > 100 * MIB > 50 * MIB > least["reassociated"]


def test_measuring_for_bitwise_moves_runs_no_engine(ran, card):
    model, x = convolutions(), torch.randn(4, 3, 32, 32)
    gistkit.plan(model, x, measure=True)
    assert ran == []
    torch.manual_seed(3)
    before = torch.get_rng_state()
    gistkit.plan(model, x, measure=True, fidelity="reassociated")
    assert ran and torch.equal(torch.get_rng_state(), before)


def test_only_engines_that_gain_time_or_workspace_are_kept(monkeypatch):
    own, rest = Algorithm("", 1.0, 100), [
        Algorithm("engine1", 2.0, 100), Algorithm("engine2", 3.0, 50), Algorithm("engine3", 4.0, 60),
        Algorithm("engine4", 0.5, 200), Algorithm("engine5", 9.0, 0)]  # fmt: skip
    assert [a.name for a in profiled._unbeaten([own, *rest])] == ["engine4", "", "engine2", "engine5"]


def test_beyond_the_time_limit_convolutions_are_left_as_they_are(ran, card, monkeypatch, caplog):
    monkeypatch.setattr(profiled, "LIMIT_S", 0.0)
    times = gistkit.measure(convolutions(), torch.randn(2, 3, 32, 32))
    assert times.workspace_bytes and not times.engines and ran == []
    assert f"{len(times.workspace_bytes)} tasks of convolutions are left with PyTorch's algorithm" in caplog.text


def test_an_engine_is_not_begun_when_time_is_over(ran, card, monkeypatch, caplog):
    began = []

    def seconds(run, device, limit_s):
        began.append(run)
        return 1e-9

    monkeypatch.setattr(profiled, "_seconds", seconds)
    monkeypatch.setattr(profiled._Where, "over", property(lambda _: bool(began)))
    times = gistkit.measure(convolutions(), torch.randn(2, 3, 32, 32))
    assert len(began) == 1 and len(times.engines) == 1
    assert f"{len(times.workspace_bytes)} tasks of convolutions are left" in caplog.text


def test_engines_are_measured_on_the_rows_that_fit(ran, card, monkeypatch):
    tried, run_of = [], profiled._run_of
    monkeypatch.setattr(profiled, "_run_of", lambda task, part, *rest: tried.append(part) or run_of(task, part, *rest))
    monkeypatch.setattr(profiled, "MOST_BYTES", 2**17)
    times = gistkit.measure(convolutions(), torch.randn(4, 3, 32, 32))
    assert len(times.engines) == len(times.workspace_bytes)
    sizes = {(part.x[0], 4 * max(math.prod(part.x), math.prod(part.y))) for part in tried}
    assert {rows for rows, _ in sizes} == {2, 4} and all(nbytes <= 2**17 for _, nbytes in sizes)


def test_the_convolutions_with_most_workspace_are_measured_first():
    graph = gistkit.capture(convolutions(), (torch.randn(2, 3, 32, 32),), backward=True)
    own = {t.index: Algorithm("", 1.0, (100 + t.call) * MIB) for t in graph.tasks if t.conv is not None}
    calls = [t.call for t in profiled._heaviest(graph, own)]
    assert len(calls) == len(own) and calls == sorted(calls, reverse=True)


def test_an_engine_that_is_clearly_slower_runs_no_more(monkeypatch):
    taken = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(profiled, "_timed", lambda run, device: next(taken))
    ran = []
    assert profiled._seconds(lambda: ran.append(0), torch.device("cpu"), limit_s=2.0) is None
    assert profiled._seconds(lambda: ran.append(0), torch.device("cpu"), limit_s=2.0) == 1.0


@pytest.mark.parametrize("last", (False, True))
@pytest.mark.parametrize("part", ("forward", "weight", "input"))
def test_each_part_runs_by_its_own(ran, part, last):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, groups=2, bias=False))
    x = torch.randn(4, 4, 8, 8)
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    expected, found = plain_and_planned(model, x, planned(model, x, {2: f"{part}=engine0"}))
    assert {p for p, _ in ran} == {part} and {name for _, name in ran} == {"eng0"}
    for name, g in expected.items():
        torch.testing.assert_close(found[name], g)
        assert found[name].stride() == g.stride()


def test_under_autocast_the_engine_takes_the_lower_dtype(ran):
    model, x = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), torch.randn(4, 4, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = plain_and_planned(model, x, planned(model, x, {2: "engine7"}))
    assert len(ran) == 3
    for name, g in expected.items():
        torch.testing.assert_close(found[name], g, rtol=0.05, atol=1e-3)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
def test_what_an_engine_does_not_take_runs_by_pytorch_and_is_told(ran):
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 4, padding="same"))
    x = torch.randn(4, 4, 8, 8)
    plan = planned(model, x, {0: "forward=engine3,weight=engine0", 2: "engine0"})
    expected, found = plain_and_planned(model, x, plan)
    assert [p for p, _ in ran] == ["weight"]
    assert all(torch.allclose(found[n], g, rtol=1e-4, atol=1e-6) for n, g in expected.items())
    text = " ".join(str(gistkit.report(model)).split())
    assert "0: forward by PyTorch's own algorithm, not cuDNN's engine3: cuDNN has engine7, engine0 for it here" in text
    assert "2: input by PyTorch's own algorithm, not cuDNN's engine0: it takes a batch of images padded evenly" in text


def test_under_a_budget_an_engine_that_is_not_there_is_an_error(ran):
    model, x = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), torch.randn(4, 4, 8, 8)
    plan = planned(model, x, {2: "weight=engine3"}, budget="1GiB", hardware="cpu")
    gistkit.compress(model, plan)
    with pytest.raises(PlanError, match=re.escape("2 was to run its weight by cuDNN's engine3, and cuDNN has engine7")):
        step(model, x)


def test_a_bitwise_plan_that_names_engines_is_damaged(ran):
    model, x = nn.Sequential(nn.Conv2d(4, 8, 3)), torch.randn(4, 4, 8, 8)
    plan = replace(planned(model, x, {0: "engine0"}), fidelity="bitwise")
    with pytest.raises(PlanError, match="fidelity must be 'reassociated', as it names engines of cuDNN"):
        gistkit.compress(model, plan)


def test_without_the_package_compress_names_it(monkeypatch):
    model, x = nn.Sequential(nn.Conv2d(4, 8, 3)), torch.randn(4, 4, 8, 8)
    plan = planned(model, x, {0: "engine0"})
    monkeypatch.setattr(cudnn_convolutions, "find_spec", lambda name: None)
    cudnn_convolutions.engines_missing.cache_clear()
    try:
        with pytest.raises(PlanError, match=r"by cuDNN's engines, and .* pip install gistkit\[cudnn\]"):
            gistkit.compress(model, plan)
    finally:
        cudnn_convolutions.engines_missing.cache_clear()


def test_names_of_other_algorithms_leave_the_choice_to_pytorch(ran):
    model, x = nn.Sequential(nn.Conv2d(4, 8, 3)), torch.randn(4, 4, 8, 8)
    plan = replace(planned(model, x, {0: "winograd"}), fidelity="bitwise")
    expected, found = plain_and_planned(model, x, plan)
    assert ran == [] and all(torch.equal(found[n], g) for n, g in expected.items())


def test_a_rerun_in_backward_runs_by_the_same_engine(ran):
    """Its bits are checked against the forward's: PyTorch's own would be refused."""
    torch.manual_seed(0)
    net = nn.Sequential(*[m for _ in range(4) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.Sigmoid())])
    x = torch.randn(4, 8, 16, 16)
    plan = gistkit.plan(net, x, policy="checkpoint")
    assert any(d.codec == "recompute" for d in plan.decisions)
    convs = [c.covered for c in gistkit.capture(net, (x,)).calls if c.op == "conv2d"]
    choices = tuple(CallChoice(c, "conv2d", algorithm="engine0") for c in convs)
    plan = replace(plan, choices=choices, fidelity="reassociated", budget_bytes=2**30, peak_bytes=2**29)
    expected = step(net, x)
    gistkit.compress(net, plan)
    for _ in range(2):
        ran.clear()
        found = step(net, x)
        forwards = [name for part, name in ran if part == "forward"]
        assert len(forwards) > len(convs) and set(forwards) == {"eng0"}
    assert all(torch.allclose(found[n], g, rtol=1e-4, atol=1e-6) for n, g in expected.items())
    assert "not recompute" not in str(gistkit.report(net))
