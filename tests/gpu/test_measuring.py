"""Measured times of a step on a CUDA device: nothing changes, all tasks are there, small cards."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

import gistkit
from gistkit import MeasureError, capture, zoo
from gistkit.api.measuring import costs_of
from gistkit.planning.simulate import simulate
from gistkit.profiling import card_at_hand
from tests.support.training import unchanged


def step(name="resnet18", batch=16, size=64):
    torch.manual_seed(0)
    model = zoo.load(name, num_classes=10, image_size=size).cuda()
    return model, torch.randn(batch, 3, size, size, device="cuda"), torch.arange(batch, device="cuda") % 10


def test_measuring_changes_no_bit_of_anything():
    model, x, targets = step()
    F.cross_entropy(model(x), targets).backward()
    with unchanged(model):
        plan = gistkit.plan(model, x, targets, loss_fn=F.cross_entropy, measure=True)
    assert plan.prediction.measured.device == torch.cuda.get_device_name()


@pytest.mark.parametrize("name", ["resnet18", "squeezenet", "googlenet", "alexnet"])
def test_every_task_has_its_time(name, tmp_path):
    model, x, _ = step(name, size=224)
    graph = capture(model, (x,), backward=True)
    times = gistkit.measure(model, x)
    assert sorted(times.seconds) == [t.index for t in graph.tasks] and times.rows == 16
    convs = {t.index for t in graph.tasks if t.conv is not None}
    assert set(times.workspace_bytes) == convs
    (tmp_path / "times.json").write_text(times.to_json())
    plan = gistkit.plan(model, x, policy="plain", measure=tmp_path / "times.json")
    costs = costs_of(graph, card_at_hand(x.device), times)
    found = simulate(graph, plan, costs)
    assert found.compute_s == pytest.approx(times.total_s, rel=1e-9)
    assert plan.step_s == pytest.approx(found.compute_s + found.stall_s, rel=1e-9)  # the host's lag is all it adds
    unasked = gistkit.plan(model, x, policy="plain")
    assert unasked.prediction.measured.device == times.device  # on a card a plan is of measured times
    assert gistkit.plan(model, x, policy="plain", measure=False).prediction.measured is None
    print(f"\n{name}: tasks {times.total_s * 1e3:.2f} ms, step {times.step_s * 1e3:.2f} ms")


def test_a_small_card():
    """Under a limit of memory fewer rows are measured; where not even one fits, the error says so."""
    model, x, _ = step("vgg16", batch=64, size=224)
    whole = gistkit.measure(model, x)
    torch.cuda.empty_cache()
    total, taken = torch.cuda.get_device_properties(0).total_memory, []
    try:
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        taken.extend(filler())  # what the process's other tests left free in blocks that are still in use
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 4 * 2**30) / total)
        part = gistkit.measure(model, x)
        assert part.rows < whole.rows == 64 and part.fingerprint == whole.fingerprint
        assert sorted(part.seconds) == sorted(whole.seconds)
        print(f"\n{part.rows} of 64 rows: {part.total_s * 1e3:.2f} ms, all: {whole.total_s * 1e3:.2f} ms")
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        taken.extend(filler())
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * 2**20) / total)
        with pytest.raises(MeasureError, match=r"must fit .* with one row of the batch at least"):
            gistkit.measure(model, x)
    finally:
        taken.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def filler() -> list[torch.Tensor]:
    """Tensors that take all that the allocator still gives, down to blocks of 2 MiB."""
    taken = []
    for mib in (512, 64, 8, 2):
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            while True:
                taken.append(torch.empty(mib * 2**20, dtype=torch.uint8, device="cuda"))
    return taken


def test_channels_last_and_the_workspace_of_convolutions():
    """cuDNN copies contiguous maps for its tensor cores: the trial in channels_last takes what a step there does."""
    layers = torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3, padding=1)
    model, last = torch.nn.Sequential(*layers).cuda(), torch.channels_last
    x = torch.randn(64, 3, 224, 224, device="cuda")
    times = gistkit.measure(model, x)
    most = max(times.workspace_bytes.values())
    there = gistkit.measure(model.to(memory_format=last), x.contiguous(memory_format=last))
    expected = max(there.workspace_bytes.values())
    promised = max(times.channels_last_bytes.get(t, n) for t, n in times.workspace_bytes.items())
    print(f"workspace: contiguous {most}, channels_last {expected}, promised {promised}; {times.workspace_remedy}")
    assert promised <= most and (not times.workspace_remedy or expected <= 1.05 * promised + 2**20)
