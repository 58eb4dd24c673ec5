"""A given plan is carried out: every kind of decision, the host, slices by call; what cannot be is refused by name."""

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.codecs import Sparse
from gistkit.errors import PlanError, PlanMismatchError
from gistkit.plan.cost import cost_table
from gistkit.plan.hardware import hardware
from gistkit.plan.plan import CallChoice, Decision, Plan
from gistkit.plan.policies.choices import call_choices
from gistkit.plan.policies.gist import gist
from gistkit.plan.policies.options import options
from gistkit.plan.policies.predicted import held, own_decisions
from gistkit.plan.policies.reading import Reading
from gistkit.plan.simulate import simulate
from gistkit.runtime import host
from gistkit.runtime.live import LiveBytes
from tests.models import DenseNet, UNet

BATCH = 4
# The CPU with a link, so that the host may be planned for it.
LINKED = replace(hardware("cpu"), name="cpu with a link", d2h_gbps=100.0, h2d_gbps=100.0, both_gbps=200.0)


class Small(nn.Module):
    """Every covered op but a residual sum: conv, norm, relu, pool, dropout, linear; an uncovered norm with a pool in
    it; two uncovered activations of one shape."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.pool, self.local, self.drop = nn.MaxPool2d(2), nn.LocalResponseNorm(3), nn.Dropout(0.5)
        self.head = nn.Linear(8 * 7 * 7, 10)

    def forward(self, x):
        x = self.local(self.norm(self.first(x)).relu())
        x = self.pool(self.second(x).relu())
        x = torch.sigmoid(x) + torch.tanh(x)
        return self.head(self.drop(x.flatten(1)).relu())


def data(size=16, classes=4):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BATCH, 3, size, size, generator=generator), torch.arange(BATCH) % classes


def captured(model, x, y, on=LINKED, density=0.7):
    graph = gistkit.capture(model, (x,), backward=True, loss_fn=loss_of, targets=(y,))
    return graph, cost_table(graph, on, density=density)


def loss_of(out, y):
    return F.cross_entropy(out if out.dim() == 2 else out.mean((2, 3)), y)


def step(model, x, y, *, seed=1):
    """(loss, gradients, LiveBytes) of one step from no gradients."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        live.track(model, x, y)
        loss = loss_of(model(x), y)
        loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()], live


def made(graph, decisions, *choices, **fields):
    """A plan with a budget that no step exceeds, so that whatever is not carried out is an error."""
    decisions = tuple(decisions)
    free = {d.storage: d for d in decisions if d.codec == "drop"}
    calls = {c.covered: c for c in (*call_choices(Reading(graph), free), *choices)}
    fields = {"budget_bytes": 2**40, "settings": {"batch": BATCH}, **fields}
    return Plan("by hand", graph.fingerprint, decisions, tuple(calls.values()), **fields)


def same(first, second):
    return torch.equal(first[0], second[0]) and all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


def ways(graph, costs, number, place, lossy=None):
    """One decision a storage: the ``number``-th codec at the place, coming back at its first use; else the first."""
    for found in options(graph, costs, "lossy" if lossy else "bitwise", lossy).values():
        late = {}
        for d in found:
            if d.place == place and (d.codec not in late or d.prefetch > late[d.codec].prefetch):
                late[d.codec] = d
        yield list(late.values())[min(number, len(late) - 1)] if late else found[0]


@pytest.mark.parametrize("make", [Small, UNet, DenseNet])
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_every_decision_is_carried_out_to_the_bit_and_the_byte(make, place, number):
    torch.manual_seed(0)
    model, (x, y) = make().train(), data()
    graph, _ = captured(model, x, y)
    recorded = gistkit.capture(model, (x,), fake=False)
    costs = cost_table(graph, LINKED, density={s.id: s.density for s in recorded.storages if s.density is not None})
    plan = made(graph, ways(graph, costs, number, place))
    twin = gistkit.compress(copy.deepcopy(model), plan)
    step(twin, x, y)
    found, plain = step(twin, x, y), step(copy.deepcopy(model), x, y)
    step(model, x, y)  # running statistics as the twin's
    assert same(found, plain)
    measured, predicted = found[2].peak_bytes, simulate(graph, plan, costs).peak_bytes
    # a synchronous copy takes an encoded payload away at once, where the plan has it wait for its release
    assert measured == predicted if place == "device" or number == 0 else 0.9 * predicted < measured <= predicted


def test_lossy_forms_on_the_host_are_those_on_the_device():
    model, (x, y) = UNet().train(), data()
    graph, costs = captured(model, x, y)
    results = []
    for place in ("device", "host"):
        decisions = [d for d in ways(graph, costs, 9, "device", "fp8") if d.codec != "rebuild"]
        if place == "host":
            decisions = list(ways(graph, costs, 9, "host", "fp8"))
            assert Counter(d.codec for d in decisions)["fp8"] > 5
        else:
            by_storage = {d.storage: d for d in ways(graph, costs, 9, "host", "fp8")}
            decisions = [replace(d, place="device", release=-1, prefetch=-1) for d in by_storage.values()]
        results.append(step(gistkit.compress(copy.deepcopy(model), made(graph, decisions)), x, y))
    assert same(*results)
    assert not same(results[0], step(copy.deepcopy(model), x, y))


class Shared(nn.Module):
    """One activation with three readers in backward."""

    def __init__(self):
        super().__init__()
        self.first, self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x):
        x = self.first(x).relu()
        return self.a(x) * self.b(x)


def hosted(graph, op, codec="dense"):
    """The decision that ships the output of the first call of an op."""
    storage = graph.values[next(c for c in graph.calls if c.op == op).results[0]].storage
    return Decision(storage, codec, "host", release=3, prefetch=8)


@pytest.mark.parametrize("codec", ["dense", "zvc"])
def test_a_payload_crosses_once_each_way_whoever_reads_it(codec, monkeypatch):
    out, back = [], []
    sent, fetched = host.sent, host.fetched
    monkeypatch.setattr(host, "sent", lambda t: out.append(t.numel()) or sent(t))
    monkeypatch.setattr(host, "fetched", lambda t, device: back.append(t.numel()) or fetched(t, device))
    model, (x, y) = Shared().train(), data()
    graph, _ = captured(model, x, y)
    decision = hosted(graph, "relu", codec)
    twin = gistkit.compress(copy.deepcopy(model), made(graph, [decision]))
    found = step(twin, x, y)
    assert same(found, step(model, x, y))
    parts = 1 if codec == "dense" else 4  # a bitmap, counts, values and no exponents
    assert len(out) == parts and out == back


@pytest.mark.parametrize("codec", ["zvc", "csr", "zvc+fp8s"])
def test_a_size_that_only_the_device_knows_is_waited_for(codec, monkeypatch):
    """As on CUDA, where a sparse encoding begins as a scratch of worst-case size."""
    model, (x, y) = Shared().train(), data()
    graph, _ = captured(model, x, y)
    plan = made(graph, [hosted(graph, "relu", codec)])
    at_once = step(gistkit.compress(copy.deepcopy(model), plan), x, y)
    monkeypatch.setattr(Sparse, "_encode", lambda self, t: self._begun(t))
    numels = []
    sent = host.sent
    monkeypatch.setattr(host, "sent", lambda t: numels.append(t.numel()) or sent(t))
    assert same(at_once, step(gistkit.compress(copy.deepcopy(model), plan), x, y))
    stored = int((F.conv2d(x, model.first.weight, model.first.bias) > 0).sum())
    assert numels[2] == stored


def test_what_is_on_the_host_is_not_on_the_device_and_goes_with_its_last_reader():
    model, (x, y) = Shared().train(), data()
    graph, _ = captured(model, x, y)
    decision = hosted(graph, "relu")
    nbytes = graph.storages[decision.storage].nbytes
    kept = {}
    for name, decisions in (("device", []), ("host", [decision])):
        twin = gistkit.compress(copy.deepcopy(model), made(graph, decisions))
        step(twin, x, y)
        with LiveBytes() as live:
            loss = loss_of(twin(x), y)
            kept[name] = live.current_bytes
            loss.backward(retain_graph=True)
            loss.backward()
            del loss
        rows = {r.storage: r for r in gistkit.report(twin).stats.rows}
        assert rows[decision.storage].kept_bytes == (0 if name == "host" else nbytes)
        gradients = sum(p.nbytes for p in model.parameters())
        assert live.current_bytes <= gradients
    assert kept["device"] - kept["host"] == nbytes


class Parts(nn.Module):
    """Saves two halves of one storage, and overwrites an activation after it was saved."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        a, b = self.first(x).chunk(2, 1)
        return self.second(a) * self.second(b)


class Own(nn.Module):
    """A ReLU that only a mean reads, a pool and a dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.pool, self.drop, self.head = (
            nn.Conv2d(3, 8, 1),
            nn.MaxPool2d(2),
            nn.Dropout(),
            nn.Conv2d(8, 4, 1),
        )

    def forward(self, x):
        return self.head(self.drop(self.pool(F.avg_pool2d(self.first(x).relu(), 2))))


def test_halves_of_a_storage_come_back_in_their_places(monkeypatch):
    model, (x, y) = Parts().train(), data()
    graph, _ = captured(model, x, y)
    sent = []
    real = host.sent
    monkeypatch.setattr(host, "sent", lambda t: sent.append(t.numel()) or real(t))
    twin = gistkit.compress(copy.deepcopy(model), made(graph, [hosted(graph, "conv2d")]))
    assert same(step(twin, x, y), step(model, x, y))
    assert sent == [4 * 8 * 14 * 14]  # all of the storage, once


def test_what_ops_keep_for_themselves_goes_to_the_host_too():
    """A ReLU's mask, a pool's map and a dropout's bits, none of which a value lies in."""
    model, (x, y) = Own().train(), data(32)
    graph, _ = captured(model, x, y)
    own = [d for d in gist(graph).decisions if d.codec in ("mask1", "argmax4", "bits")]
    assert [d.codec for d in own] == ["mask1", "argmax4", "bits"]
    results, kept = [], []
    for place in ("device", "host"):
        decisions = [replace(d, place=place, release=9, prefetch=12) for d in own]
        twin = gistkit.compress(copy.deepcopy(model), made(graph, decisions))
        results.append(step(twin, x, y))
        rows = [
            r for r in gistkit.report(twin).stats.rows if r.op in ("relu", "max_pool2d", "dropout") and r.storage < 0
        ]
        kept.append(sum(r.kept_bytes for r in rows))
    pooled = 4 * 8 * 8 * 8
    assert kept == [4 * pooled // 8 * 4 + pooled // 2 + pooled // 8, 0]
    assert same(*results) and same(results[0], step(model, x, y))


class Alike(nn.Module):
    """Uncovered ops that save three tensors of one shape between two covered calls."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3)

    def forward(self, x):
        x = self.conv(x)
        return self.head(torch.tanh(torch.sigmoid(torch.exp(x))))


@pytest.mark.parametrize("chosen", [(), ("exp",), ("sigmoid",), ("tanh",), ("exp", "tanh")])
def test_uncovered_saves_of_one_shape_are_told_apart_by_their_order(chosen, monkeypatch):
    out = []
    sent = host.sent
    monkeypatch.setattr(host, "sent", lambda t: out.append(t.clone()) or sent(t))
    model, (x, y) = Alike().train(), data()
    graph, _ = captured(model, x, y)
    twin = gistkit.compress(copy.deepcopy(model), made(graph, [hosted(graph, op) for op in chosen]))
    assert same(step(twin, x, y), step(copy.deepcopy(model), x, y))
    with torch.no_grad():
        values = {"exp": torch.exp(model.conv(x))}
        values["sigmoid"] = torch.sigmoid(values["exp"])
        values["tanh"] = torch.tanh(values["sigmoid"])
    assert len(out) == len(chosen) and all(torch.equal(t, values[op]) for t, op in zip(out, chosen, strict=True))


def test_slices_are_those_of_each_call():
    model, (x, y) = Shared().train(), data()
    graph, _ = captured(model, x, y)
    relu = replace(hosted(graph, "relu", "zvc"), place="device", release=-1, prefetch=-1)
    plain = step(copy.deepcopy(model), x, y)
    changed = {}
    for covered in (0, 2, 3):
        plan = made(graph, [relu], CallChoice(covered, "conv2d", slices=4), fidelity="reassociated")
        found = step(gistkit.compress(copy.deepcopy(model), plan), x, y)
        names = [n for n, _ in model.named_parameters()]
        changed[covered] = {n for n, a, b in zip(names, found[1], plain[1], strict=True) if not torch.equal(a, b)}
        # sums of 4 x 14 x 14 (12 x 12) products, in another order: n eps of the sum of their sizes at most
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found[1], plain[1], strict=True))
        assert torch.equal(found[0], plain[0])
    assert changed[0] <= {"first.weight", "first.bias"} and changed[0]
    assert changed[2] <= {"a.weight", "a.bias"} and changed[2]
    assert changed[3] <= {"b.weight", "b.bias"} and changed[3]


def test_what_a_plan_leaves_open_stays_as_it_is():
    model, (x, y) = UNet().train(), data()
    graph, costs = captured(model, x, y, hardware("cpu"))
    plan = replace(made(graph, own_decisions(graph)), choices=())  # maps that no op makes in another form
    twin = gistkit.compress(copy.deepcopy(model), plan)
    step(twin, x, y)
    assert step(twin, x, y)[2].peak_bytes == simulate(graph, plan, costs).peak_bytes
    rows = gistkit.report(twin).stats.rows
    assert {r.codec for r in rows if r.storage >= 0} == {"dense"} and len(rows) > 20


def test_shapes_inside_a_local_response_norm_are_not_kept():
    model, (x, y) = nn.Sequential(nn.Conv2d(3, 8, 3), nn.LocalResponseNorm(3), nn.Conv2d(8, 4, 3)).train(), data()
    graph, costs = captured(model, x, y, hardware("cpu"))
    plan = gist(graph)
    assert "drop" in {d.codec for d in plan.decisions}
    twin = gistkit.compress(copy.deepcopy(model), replace(plan, budget_bytes=2**40))
    step(twin, x, y)
    found = step(twin, x, y)
    assert same(found, step(model, x, y))
    assert found[2].peak_bytes == simulate(graph, plan, costs).peak_bytes


def test_the_format_is_the_plans():
    model, (x, y) = UNet().train(), data()
    graph, _ = captured(model, x, y)
    plan = gist(graph, lossy="fp8")
    results = [step(gistkit.compress(copy.deepcopy(model), plan, lossy=lossy), x, y) for lossy in (None, "fp8")]
    assert same(*results)
    with pytest.raises(
        ValueError, match=r"lossy must be None or the plan's own format 'fp8', got 'fp16'; leave it out"
    ):
        gistkit.compress(copy.deepcopy(model), plan, lossy="fp16")


def refused(model, graph, decision, error, text, **fields):
    x, y = data()
    plan = made(graph, [decision])
    with pytest.raises(error, match=text):
        step(gistkit.compress(copy.deepcopy(model), replace(plan, **fields)), x, y)
    return plan


def test_a_budget_that_cannot_be_kept_is_an_error_and_without_one_a_note():
    model, (x, y) = Shared().train(), data()
    graph, _ = captured(model, x, y)
    storage = graph.values[next(c for c in graph.calls if c.op == "relu").results[0]].storage
    text = (
        rf"budget cannot be kept: storage {storage} \(relu of the model, shape \(4, 8, 14, 14\)\) was to be 'mask1', "
        "and a backward needs its values; take another policy or class of moves, or no budget"
    )
    plan = refused(model, graph, Decision(storage, "mask1"), PlanError, text)
    twin = gistkit.compress(copy.deepcopy(model), replace(plan, budget_bytes=None))
    assert same(step(twin, x, y), step(model, x, y))
    assert "not mask1 as planned: a backward needs its values" in str(gistkit.report(twin).stats.rows)


def test_a_rebuild_that_is_not_exact_breaks_a_budget(monkeypatch):
    monkeypatch.setattr("gistkit.runtime.handlers.arithmetic", lambda *_: None)
    model, (x, y) = UNet().train(), data()
    graph, _ = captured(model, x, y)
    plan = gist(graph)
    assert any(d.codec == "rebuild" for d in plan.decisions)
    with pytest.raises(PlanError, match="was to be 'rebuild', and it cannot be rebuilt bit for bit on this device"):
        step(gistkit.compress(copy.deepcopy(model), replace(plan, budget_bytes=2**40)), x, y)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    assert same(step(twin, x, y), step(model, x, y))


def test_other_models_and_larger_batches_are_refused():
    model, (x, y) = Small().train(), data()
    graph, _ = captured(model, x, y)
    plan = made(graph, [])
    other = gistkit.compress(Shared().train(), plan)
    with pytest.raises(PlanMismatchError, match=rf"fingerprint {plan.fingerprint}, got one with fingerprint \w+; make"):
        other(x)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    step(twin, x[:3], y[:3])
    with pytest.raises(
        PlanMismatchError, match="a forward of at most 4 rows, got one of 8 rows; plan for a batch of 8"
    ):
        twin(torch.cat([x, x]))
    step(gistkit.compress(copy.deepcopy(model), replace(plan, budget_bytes=None)), torch.cat([x, x]), torch.cat([y, y]))
    twin.eval()
    twin(torch.cat([x, x]))
    with torch.autograd.graph.save_on_cpu(), pytest.raises(PlanMismatchError, match=r"by itself, .* other saved"):
        gistkit.compress(copy.deepcopy(model), plan)(x)
    hooked = copy.deepcopy(model)
    hooked.pool.register_forward_hook(lambda *_: None)
    with pytest.raises(
        PlanMismatchError, match=r"a forward that can be captured, as for the plan, got .* forward hooks"
    ):
        gistkit.compress(hooked, plan)(x)


def test_larger_images_are_refused_however_often_smaller_ones_came():
    model, (x, y) = UNet().train(), data()
    graph, _ = captured(model, x, y)
    plan = replace(gist(graph), budget_bytes=2**40, settings={"batch": BATCH})
    assert plan.plain_bytes == graph.kept_bytes == sum(b.nbytes for b in held(graph))
    twin = gistkit.compress(copy.deepcopy(model), plan)
    for size in (8, 16, 12, 16):
        step(twin, x[..., :size, :size], y)
    large, _ = data(32)
    text = rf"saves at most {plan.plain_bytes} bytes in plain PyTorch, .*, got one that saves \d+; plan for inputs of"
    for rows in (4, 4, 2):  # four times the pixels: two rows save more than was planned for four
        with pytest.raises(PlanMismatchError, match=text):
            twin(large[:rows])
        step(twin, large[:1], y[:1])


def test_sub_batches_are_taken_by_step():
    model, (x, y) = Shared().train(), data()
    graph, _ = captured(model, x, y)
    plan = made(graph, [], sub_batches=2, budget_bytes=None)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    text = r"at most 2 rows \(a batch of 4 in 2 sub-batches\), got one of 4 rows; call gistkit.step\(model, loss_fn,"
    with pytest.raises(PlanMismatchError, match=text):
        twin(x)
    gistkit.step(twin, loss_of, x, y)
    whole = step(model, x, y)
    assert all(
        torch.allclose(p.grad, g, rtol=1e-4, atol=1e-6) for p, g in zip(twin.parameters(), whole[1], strict=True)
    )


def test_a_plan_of_the_cpus_operators_is_that_of_a_model_anywhere():
    real, (x, _) = Small().train(), data()
    with torch.device("meta"):
        elsewhere = Small().train()
    here = gistkit.capture(real, (x,))
    there = gistkit.capture(elsewhere, (x.to("meta"),), on_cpu=True)
    assert (here.calls, here.storages, here.values) == (there.calls, there.storages, there.values)
    with pytest.raises(ValueError, match="on_cpu=True needs fake=True, got fake=False"):
        gistkit.capture(real, (x,), fake=False, on_cpu=True)


def test_report_of_a_budget():
    model, (x, y) = UNet().train(), data()
    plan = gistkit.plan(model, x, budget="80%", density=0.3, policy="gist")
    twin = gistkit.compress(copy.deepcopy(model), plan)
    assert "budget" in str(gistkit.report(twin)) and gistkit.report(twin).budget.denser == {}
    step(twin, x, y)
    report = gistkit.report(twin)
    found = report.budget
    assert (found.budget_bytes, found.predicted_bytes) == (plan.budget_bytes, plan.peak_bytes)
    assert found.measured_bytes is None
    assert found.denser and all(was == 0.3 < now == report.densities[s] for s, (was, now) in found.denser.items())
    assert found.excess_bytes > 0
    text = " ".join(str(report).split())
    assert f"budget {plan.budget_bytes / 2**20:.2f} MiB, predicted peak {plan.peak_bytes / 2**20:.2f} MiB" in text
    assert "have fewer zeros than planned for" in text and "plan again with density=gistkit.report(model)" in text
    again = gistkit.plan(model, x, budget="90%", density=report.densities, policy="gist")
    twin = gistkit.compress(copy.deepcopy(model), again)
    step(twin, x, y)
    assert gistkit.report(twin).budget.denser == {}
