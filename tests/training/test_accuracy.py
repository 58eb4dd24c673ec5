"""Accuracy under schemes: what each rounds, images on the device, runs that are killed, verdicts, densities."""

import json
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import gistkit
from gistkit.capture import capture
from gistkit.codecs import CODECS
from gistkit.errors import DataError, PlanError
from gistkit.training import (
    Accuracy,
    AccuracySettings,
    DeviceImages,
    ImageSet,
    accuracy,
    carry_out,
    device_images,
    difference,
    plan_of,
    scheme,
)
from gistkit.training import schemes as all_schemes
from gistkit.training.device_images import epoch_seed
from gistkit.training.loop import share_of_rate

HERE = "tests.training.test_accuracy"
SETTINGS = {"model": f"{HERE}:normed", "schemes": ("fp32",), "seeds": 1, "epochs": 3, "batch": 256, "lr": 0.05}


def normed(num_classes):
    """Everything that a run has to take up again: batch norm's statistics, dropout's masks, a rebuild."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(72, num_classes),
    )  # fmt: skip


def linear(num_classes):
    """Nothing in it is kept but the images."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, num_classes))


def deep():
    """Convolutions enough for an error to grow on its way."""
    layers = []
    for width in (3, 16, 16, 16, 16):
        layers += [nn.Conv2d(width, 16, 3, padding=1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))


@pytest.fixture(autouse=True)
def images_decoded_once(monkeypatch):
    monkeypatch.setattr(accuracy, "device_images", decoded)


decoded = cache(device_images)


def settings(**changes):
    return AccuracySettings(**{**SETTINGS, **changes})


@cache
def step(name):
    """(loss, gradients by parameter) of one step on digits-like images under a scheme."""
    torch.manual_seed(0)
    model, x, y = deep().train(), torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
    carry_out(scheme(name), plan_of(scheme(name), capture(model, (x,))), model)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def error(name):
    """The gradients' error, relative to exact ones."""
    (_, exact), (_, found) = step("fp32"), step(name)
    wrong = sum((a - b).square().sum() for a, b in zip(exact, found, strict=True))
    return float((wrong / sum(a.square().sum() for a in exact)).sqrt())


def test_errors_are_ordered_as_theory_says():
    """Delayed rounding errs less than immediate one; a scale helps; a bit less is an error more."""
    found = {n: error(n) for n in ("fp16", "fp10", "fp8", "fp8s")}
    at_once = {n: error(f"immediate:{n}") for n in ("fp8", "fp8s")}
    assert all(0 < found[n] < at_once[n] for n in at_once)
    assert found["fp16"] < found["fp10"] < found["fp8"]
    assert found["fp8s"] <= found["fp8"] and at_once["fp8s"] <= at_once["fp8"]


def test_only_immediate_rounding_changes_the_loss():
    exact = step("fp32")[0]
    for name in ("fp8", "zvc+fp8s", "gradients:fp8"):
        loss, gradients = step(name)
        assert torch.equal(loss, exact) and not torch.equal(gradients[2], step("fp32")[1][2])
    assert not torch.equal(step("immediate:fp8")[0], exact)


def test_a_sparse_layout_changes_bytes_and_no_bit_of_unscaled_values(layout="csr"):
    torch.manual_seed(0)
    graph = capture(deep().train(), (torch.randn(8, 3, 16, 16),))
    plan = plan_of(scheme(f"{layout}+fp8"), graph)
    assert {d.codec for d in plan.decisions if d.form.rounds_to} == {f"{layout}+fp8"}
    pairs = zip(step("fp8")[1], step(f"{layout}+fp8")[1], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_delayed_scheme_is_compress_with_lossy():
    torch.manual_seed(0)
    model, x, y = deep().train(), torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
    F.cross_entropy(gistkit.compress(model, lossy="fp8s")(x), y).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), step("fp8s")[1], strict=True))


def test_controls_round_every_module_and_nothing_else():
    codec = CODECS["fp8"]
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True)), torch.randn(2, 3, 8, 8)
    (conv, _), want = model, x
    for layer in (conv, F.relu):
        want = codec.decode(codec.encode(layer(want).detach()))
    carry_out(scheme("immediate:fp8"), None, model)
    assert torch.equal(model(x), want) and torch.equal(model.eval()(x), want)
    linear, grad = nn.Linear(4, 5, bias=False), torch.randn(7, 5) / 1000
    carry_out(scheme("gradients:fp8"), None, linear)
    x = torch.randn(7, 4, requires_grad=True)
    linear(x).backward(grad)
    rounded = codec.decode(codec.encode(grad * 7)) / 7  # of the sum over the seven rows
    assert torch.equal(x.grad, rounded @ linear.weight) and rounded.count_nonzero() > 0


def test_schemes_follow_the_codecs():
    names = all_schemes()
    assert {"fp32", "fp8s", "int4s", "auto", "zvc+fp8", "csr+fp10s", "immediate:fp16", "gradients:fp8"} <= set(names)
    assert "immediate:zvc+fp8" not in names and "zvc" not in names and "mask1" not in names
    with pytest.raises(ValueError, match=r"scheme must be one of fp32, .*; got 'immediate:fp9'; did you mean 'immedia"):
        scheme("immediate:fp9")


def random_images(count, size=6):
    pixels = torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    names = tuple(map(str, range(count)))
    return pixels, ImageSet(
        "random", names, torch.arange(count), ((0.2, 0.4, 0.6), (0.5, 0.25, 0.125)), lambda i: pixels[i]
    )


def normalised(pixels):
    mean, std = torch.tensor([0.2, 0.4, 0.6]).view(3, 1, 1), torch.tensor([0.5, 0.25, 0.125]).view(3, 1, 1)
    return (pixels.float() / 255 - mean) / std


def test_every_image_is_a_crop_of_itself():
    pixels, images = random_images(25)
    crops, sides, seen = set(), set(), []
    for x, labels in DeviceImages(images).epoch(8, seed=3, flip=True):
        assert x.shape == (8, 3, 6, 6) and x.is_contiguous()
        for image, label in zip(x, labels.tolist(), strict=True):
            bordered = F.pad(pixels[label], (4, 4, 4, 4))
            found = [
                (top, left, turned)
                for top in range(9)
                for left in range(9)
                for turned in (False, True)
                for crop in [bordered[:, top : top + 6, left : left + 6]]
                if torch.equal(normalised(crop.flip(2) if turned else crop), image)
            ]
            assert len(found) == 1
            crops.add(found[0][:2])
            sides.add(found[0][2])
            seen.append(label)
    assert len(set(seen)) == len(seen) == 24 and seen != sorted(seen)
    assert len(crops) > 12 and sides == {False, True}


def test_an_epoch_depends_on_its_seed_alone_and_a_test_is_whole():
    pixels, images = random_images(10)
    on_device = DeviceImages(images)
    a, b, c = ([x for x, _ in on_device.epoch(5, seed=s, flip=True)] for s in (1, 1, 2))
    assert all(map(torch.equal, a, b)) and not all(map(torch.equal, a, c))
    parts = list(on_device.whole(4))
    assert [len(x) for x, _ in parts] == [4, 4, 2]
    assert torch.equal(torch.cat([x for x, _ in parts]), normalised(pixels))
    assert torch.equal(torch.cat([y for _, y in parts]), images.labels)


def figures(folder):
    """The rows without what a clock says, in the order of the runs."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return sorted(({k: v for k, v in r.items() if k != "seconds"} for r in rows), key=lambda r: json.dumps(r))


class Killed(Exception):
    """Stands for a kill between two steps."""


def stop_at(name, steps):
    def on_step(scheme_name, done):
        if (scheme_name, done) == (name, steps):
            raise Killed

    return on_step


def test_a_stopped_run_goes_on_to_the_same_figures(tmp_path, monkeypatch):
    of = settings(schemes=("fp32", "fp8s"), epochs=2, density=4)
    whole, parts = Accuracy(of, tmp_path / "whole").run(), tmp_path / "parts"

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(torch, "save", killed)
        Accuracy(of, parts).run()
    assert len(figures(parts)) == 1  # a row without its checkpoint
    for name, steps in (("fp32", 5), ("fp32", 7), ("fp8s", 6)):
        with pytest.raises(Killed):
            Accuracy(of, parts).run(stop_at(name, steps))
    resumed = []
    found = Accuracy(of, parts).run(lambda name, done: resumed.append((name, done)))
    assert found == whole and figures(parts) == figures(tmp_path / "whole")
    assert resumed[:2] == [("fp32", 10), ("fp8s", 5)]
    assert [p.name for p in parts.iterdir()] == ["rows.jsonl"]


def test_an_exact_run_is_an_ordinary_training_loop(tmp_path):
    of = settings(epochs=2)
    Accuracy(of, tmp_path).run()
    (train, test), losses = decoded("digits", 32), []
    torch.manual_seed(0)
    model = normed(10)
    sgd = torch.optim.SGD(model.parameters(), of.lr, momentum=0.9, weight_decay=5e-4)
    rates = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: share_of_rate(step, 10))
    for epoch in range(2):
        torch.manual_seed(epoch_seed(0, epoch))
        for x, y in train.epoch(256, epoch_seed(0, epoch), flip=False):
            sgd.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            sgd.step()
            rates.step()
            losses.append(loss.detach())
    model.eval()
    correct = [(model(x).argmax(1) == y).sum() for x, y in test.whole(256)]
    last = figures(tmp_path)[-1]
    assert last["epoch"] == 1 and last["loss"] == torch.stack(losses[5:]).mean().item()
    assert last["accuracy"] == sum(map(int, correct)) / 360


def test_a_finished_run_is_kept_and_others_join_it(tmp_path):
    of = settings(epochs=1)
    first = Accuracy(of, tmp_path).run()
    row, taken = json.loads((tmp_path / "rows.jsonl").read_text()), []
    both = Accuracy(settings(epochs=1, seeds=2, schemes=("fp32", "gradients:fp8s")), tmp_path)
    found = both.run(lambda name, done: taken.append((name, done)))
    assert found[0].accuracies[0] == first[0].accuracies[0] and len(found[0].accuracies) == 2
    assert taken[0] == ("fp32", 5) and ("fp32", 1) not in taken and ("fp32", 6) in taken
    assert row["plain_bytes"] == row["kept_bytes"] and row["train_accuracy"] > 0 and row["loss"] > 0
    assert row["environment"]["torch"] == torch.__version__ and row["device"] == "cpu"
    with pytest.raises(
        ValueError, match=r"rows.jsonl must hold rows of these settings, got lr 0.05 there and 0.1 here"
    ):
        Accuracy(settings(epochs=1, lr=0.1), tmp_path)


def test_bits_are_of_all_that_is_kept(tmp_path):
    exact, fp8, at_once = Accuracy(settings(schemes=("fp32", "fp8", "immediate:fp8"), epochs=1), tmp_path).run()
    graph = capture(normed(10).train(), (torch.zeros(256, 3, 32, 32),))
    elements = sum(torch.Size(s.shape).numel() for s in graph.kept())
    assert exact.kept_bytes == graph.kept_bytes and exact.bits == 8 * graph.kept_bytes / elements > 32
    model = gistkit.compress(normed(10), lossy="fp8")
    model(torch.randn(256, 3, 32, 32))
    near = gistkit.report(model).stats.kept_bytes
    assert fp8.kept_bytes == pytest.approx(near, rel=0.1) and fp8.bits == 8 * fp8.kept_bytes / elements
    assert at_once.bits is None and at_once.kept_bytes is None


def test_digits_are_learnt_under_rounding(tmp_path):
    of = settings(schemes=("immediate:fp8", "auto"), epochs=3, batch=64)
    found = Accuracy(of, tmp_path).run()
    assert found[1].bits < 32
    for result in found:
        assert result.accuracies[0] > 0.6 and result.difference is None, result.scheme
        assert len(result.curves[0]) == 3 and result.curves[0][-1] == result.accuracies[0]


def test_images_to_test_on_and_for_a_batch_are_asked_for(tmp_path):
    def save(name, count):
        (tmp_path / name / "ape").mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (32, 32)).save(tmp_path / name / "ape" / f"{i}.png")

    of = settings(data=str(tmp_path), batch=6)
    save("train", 5)
    with pytest.raises(DataError, match="must have images to test on; put them into test/CLASS"):
        Accuracy(of, tmp_path / "out")
    save("test", 1)
    with pytest.raises(DataError, match="a batch of 6 needs as many images, there are 5"):
        Accuracy(of, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_settings_are_refused(tmp_path):
    for changes, text in (
        ({"schemes": ("fp8", "fp8")}, "schemes must be at least one, each once, got 'fp8,fp8'"),
        ({"seeds": 0}, "seeds must be from 1 to 65536, got 0"),
    ):
        with pytest.raises(ValueError, match=text):
            settings(**changes)
    with pytest.raises(PlanError, match="scheme fp8 must round something of what the network keeps"):
        Accuracy(settings(model=f"{HERE}:linear", schemes=("fp8",)), tmp_path)
    (tmp_path / "rows.jsonl").write_text("no JSON\n")
    with pytest.raises(ValueError, match=r"rows.jsonl must hold a JSON row a line .*; remove it, or name another"):
        Accuracy(settings(), tmp_path)


def test_the_verdict_is_welchs():
    """By hand: variances 1/3 of (0, 1, 2)/100 and of (0, 2, 4)/100, so s = sqrt(5/3)/100 and
    nu = (1/3 + 4/3)^2 / ((1/3)^2 / 2 + (4/3)^2 / 2) = 50/17; t(0.95, 50/17) = 2.3725."""
    found = difference((0.50, 0.52, 0.54), (0.50, 0.51, 0.52))
    width = 2.3725 * (5 / 3) ** 0.5 / 100
    assert found.mean == pytest.approx(0.01)
    assert (found.low, found.high) == pytest.approx((0.01 - width, 0.01 + width), rel=1e-3)
    assert found.verdict(0.03) == "not worse" and found.verdict(0.005) == "open"
    assert difference((0.40, 0.42, 0.41), (0.60, 0.62, 0.61)).verdict(0.005) == "worse"
    assert difference((0.6, 0.6), (0.50, 0.52)).low > 0  # one side without variance
    assert difference((0.61, 0.61), (0.61, 0.61)).verdict(0.005) == "not worse"
    assert difference((0.5,), (0.5, 0.6)) is None


def test_densities_are_counted_and_feed_a_plan(tmp_path):
    of = settings(epochs=1, density=2)
    experiment = Accuracy(of, tmp_path)
    experiment.run()
    rows = [found for row in figures(tmp_path) for found in row["densities"]]
    assert [r["step"] for r in rows if r["module"] == "2"] == [0, 2, 4]
    # the first step's, anew
    torch.manual_seed(0)
    model, counted = normed(10).train(), {}
    for name in "2", "4", "5":
        keep = lambda _, __, y, name=name: counted.update({name: y.count_nonzero().item() / y.numel()})  # noqa: E731
        model[int(name)].register_forward_hook(keep)
    x, _ = next(experiment._train_images.epoch(256, epoch_seed(0, 0), flip=False))
    graph = capture(normed(10).train(), (x,))
    model(x)
    first = {r["module"]: r for r in rows if r["step"] == 0}
    assert {name: first[name]["density"] for name in counted} == pytest.approx(counted)
    for r in rows:
        n, d = r["elements"], r["density"]
        shape = graph.storages[r["storage"]].shape
        assert shape.count(256) and n == torch.Size(shape).numel()
        assert r["zvc"] == pytest.approx(4 * n / (130 * -(-n // 1024) + 4 * round(d * n)))
        assert r["csr"] == pytest.approx(4 * n / (2 * -(-n // 256) + 5 * round(d * n)))
    density = {r["storage"]: r["density"] for r in rows if r["step"] == 4}
    plan = gistkit.plan(normed(10).train(), x, policy="gist", density=density)
    assert plan.contract.densities and plan.contract.densities.items() <= density.items()
