"""Measured times of a step on a CUDA device: nothing changes, all tasks are there, small cards, cuDNN's switches."""

import copy

import pytest
import torch
import torch.nn.functional as F

import gistkit
from gistkit import MeasureError, StepTimes, capture, cli, zoo
from gistkit.planning.cost.part_algorithms import DEFAULT, SWITCHES, is_switched

pytestmark = pytest.mark.gpu


def step(name="resnet18", batch=16, size=64):
    torch.manual_seed(0)
    model = zoo.load(name, num_classes=10, image_size=size).cuda()
    return model, torch.randn(batch, 3, size, size, device="cuda"), torch.arange(batch, device="cuda") % 10


def loss_of(model, x, targets):
    loss = F.cross_entropy(model(x), targets)
    loss.backward()
    return loss


def test_measuring_changes_no_bit_of_anything():
    model, x, targets = step()
    loss_of(model, x, targets)
    twin, gradients = copy.deepcopy(model), [p.grad.clone() for p in model.parameters()]
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    plan = gistkit.plan(model, x, targets, loss_fn=F.cross_entropy, measure=True)
    assert plan.prediction.measured.device == torch.cuda.get_device_name()
    assert torch.equal(torch.cuda.get_rng_state(), before[0]) and torch.equal(torch.get_rng_state(), before[1])
    for (name, now), then in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(now, then), name
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


@pytest.mark.parametrize("name", ["resnet18", "squeezenet", "googlenet", "alexnet"])
def test_every_task_has_its_time(name, tmp_path):
    model, x, _ = step(name, size=224)
    graph = capture(model, (x,), backward=True)
    times = gistkit.measure(model, x)
    assert sorted(times.seconds) == [t.index for t in graph.tasks] and times.rows == 16
    convs = {t.index for t in graph.tasks if t.conv is not None}
    assert set(times.convolutions) == {DEFAULT, *SWITCHES}
    assert all(set(tasks) == convs for tasks in times.convolutions.values())
    (tmp_path / "times.json").write_text(times.to_json())
    plan = gistkit.plan(model, x, policy="plain", measure=tmp_path / "times.json")
    assert plan.step_s == pytest.approx(times.total_s, rel=1e-9)
    print(f"\n{name}: tasks {times.total_s * 1e3:.2f} ms, step {times.step_s * 1e3:.2f} ms")
    for switches, tasks in times.convolutions.items():
        total_s, most = sum(s for s, _ in tasks.values()), max(b for _, b in tasks.values())
        print(f"  convolutions, {switches}: {total_s * 1e3:.2f} ms, workspace up to {most / 2**20:.1f} MiB")


def test_a_small_card():
    """Under a limit of memory fewer rows are measured; where not even one fits, the error says so."""
    model, x, _ = step("vgg16", batch=64, size=224)
    whole = gistkit.measure(model, x)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    held = torch.cuda.memory_reserved()
    try:
        torch.cuda.set_per_process_memory_fraction((held + 4 * 2**30) / total)
        part = gistkit.measure(model, x)
        assert part.rows < whole.rows == 64 and part.fingerprint == whole.fingerprint
        assert sorted(part.seconds) == sorted(whole.seconds)
        print(f"\n{part.rows} of 64 rows: {part.total_s * 1e3:.2f} ms, all: {whole.total_s * 1e3:.2f} ms")
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * 2**20) / total)
        with pytest.raises(MeasureError, match=r"must fit .* with one row of the batch at least"):
            gistkit.measure(model, x)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def test_a_plan_under_switches_trains():
    """Another algorithm sums in another order: gradients agree as two orders of sums do."""
    model, x, targets = step(batch=8)
    times = gistkit.measure(model, x, targets, loss_fn=F.cross_entropy)
    # Switches that look better than they are, so that all of them are taken.
    default = times.convolutions[DEFAULT]
    better = {t: (s / 2, b) for t, (s, b) in default.items()}
    made_up = StepTimes(**{**vars(times), "convolutions": {DEFAULT: default, "deterministic": better}})
    plan = gistkit.plan(model, x, targets, loss_fn=F.cross_entropy, measure=made_up, fidelity="reassociated")
    assert plan.fidelity == "reassociated" and any(is_switched(c.algorithm) for c in plan.choices)
    plain = copy.deepcopy(model)
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    gistkit.compress(model, plan)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        plain.zero_grad(set_to_none=True)
        loss, wanted = loss_of(model, x, targets), loss_of(plain, x, targets)
        assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == before
        # TF32 keeps 10 bits of a factor; whichever algorithm runs, it rounds factors alike and sums in fp32, so that
        # two orders differ by far less than one TF32 rounding of the whole.
        assert torch.allclose(loss, wanted, rtol=2**-10)
    total = sum((p.grad - q.grad).square().sum() for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert total <= 2**-10 * sum(q.grad.square().sum() for q in plain.parameters())


def test_the_command(tmp_path, capsys):
    file = tmp_path / "times.json"
    arguments = ["resnet18", "--batch", "16", "--image-size", "64"]
    assert cli.main(["profile", *arguments, "--measure", "--times", str(file)]) == 0
    assert f"measured on {torch.cuda.get_device_name()}" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["plan", *arguments, "--times", str(file), "--policy", "gist"]) == 0
