"""Accuracy under schemes: the trainings of a campaign in parallel processes on one GPU, all rows in one file.

    python unpack_cifar10.py /tmp/cifar10
    python -m bench.accuracy --data /tmp/cifar10 --out bench/results/NAME.jsonl --max-s 540 [--jobs 8] [--only resnet20]
    python -m bench.accuracy_page bench/results/NAME.jsonl

Each training (network, scheme, seed) of ``CAMPAIGN`` is one of ``gistkit accuracy``'s, in a process of its own:
networks this small leave parts of the GPU idle. A step is one CUDA graph: 3.8 ms for ResNet-20 on an H200, 0.6 to 9.5
for the others, so that a ResNet-20 of thirty epochs takes 22 s alone. They begin in the campaign's order, ``--jobs`` at
a time; the images are decoded once, before the processes are forked. ``--max-s`` counts from the start. A training that
would end too late, by the latest epoch of its network, does not begin. Where the first that runs would end too late,
the last that began is stopped, and the others get its share of the device. What runs at the end is killed. ``--out`` is
written anew every half minute: a row an epoch and a row a measured density; ``finished`` is whether the training has
all its epochs. Trainings that the file has finished are not run again, so the same command goes on with the rest.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import rows as files
from gistkit.training import Accuracy, AccuracySettings, DeviceImages, device_images

IMAGE_SIZE = 32
POLL_S, WRITE_S, STOP_S = 0.5, 30.0, 30.0
Row = dict[str, Any]
Key = tuple[str, str, int]
Images = tuple[DeviceImages, DeviceImages]


class Entry(NamedTuple):
    """Schemes of one network, each with these seeds; ``density``: steps between measurements under fp32, 0 for none."""

    model: str
    schemes: str
    seeds: range
    epochs: int
    batch: int
    lr: float
    density: int = 0
    image_size: int = IMAGE_SIZE


VGG_BN, INCEPTION = "bench.networks:vgg16_bn", "bench.networks:inception"
CAMPAIGN = (
    Entry("resnet20", "fp32 int4s fp8 immediate:fp8 auto", range(3), 30, 256, 0.2),
    Entry("resnet20", "auto:0.04 fp32 int4s", range(5), 30, 256, 0.2),
    Entry("alexnet", "fp32 fp8 fp10 immediate:fp16 immediate:fp8 int4s", range(3), 15, 256, 0.03),
    Entry("vgg16", "fp32 fp8 fp10 fp16 immediate:fp16 int4s", range(3), 15, 256, 0.03, density=98),
    Entry("resnet20", "int2s", range(3), 30, 256, 0.2),
    Entry(VGG_BN, "fp32 fp8 int4s", range(3), 15, 256, 0.1),
    Entry(INCEPTION, "fp32 fp8 fp10 immediate:fp16 int4s", range(3), 10, 256, 0.03),
    Entry("overfeat", "fp32 fp8 immediate:fp8", range(2), 8, 256, 0.02, image_size=72),
    Entry("resnet20", "gradients:fp8 fp8s immediate:fp16 fp10 fp16", range(1), 30, 256, 0.2),
    Entry("alexnet", "auto:0.04 int2s gradients:fp8", range(3), 15, 256, 0.03),
    Entry("vgg16", "auto:0.04", range(3), 15, 256, 0.03),
    Entry(VGG_BN, "auto:0.04", range(3), 15, 256, 0.1),
)
"""What matters most comes first. A batch of 256 halves the host's work; a rate of 0.2 is that of 0.1 at 128."""


@dataclass
class Training:
    """One training. Its settings name the CPU: what asks CUDA for anything cannot be forked. ``folder`` and ``process``
    are those of a training that has begun."""

    settings: AccuracySettings
    seed: int
    folder: Path = Path()
    process: Any = None

    @property
    def key(self) -> Key:
        """What its rows are known by."""
        return self.settings.model, self.settings.schemes[0], self.seed

    def epochs(self) -> list[Row]:
        """Its rows so far; a line that is just being written is left out."""
        file = self.folder / "rows.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def epoch_s(self) -> float:
        """Seconds of its latest epoch; 0 before the second, as the first has captures and compilations in it."""
        epochs = self.epochs()
        return epochs[-1]["seconds"] if len(epochs) > 1 else 0.0

    def left_s(self) -> float:
        """Predicted seconds to its end, 0 where nothing is known."""
        if not (epoch_s := self.epoch_s()):
            return 0.0
        since_s = time.time() - (self.folder / "rows.jsonl").stat().st_mtime
        return (self.settings.epochs - len(self.epochs())) * epoch_s - since_s

    def rows(self) -> list[Row]:
        """Epochs and densities so far, as ``--out`` has them."""
        epochs = self.epochs()
        found = [{"kind": "epoch", **{k: v for k, v in row.items() if k != "densities"}} for row in epochs]
        for row in epochs:
            about = {name: row[name] for name in ("model", "scheme", "seed", "epoch")}
            found += [{"kind": "density", **about, **density} for density in row["densities"]]
        return [{**row, "finished": len(epochs) == self.settings.epochs} for row in found]


def trainings(campaign: Iterable[Entry], options: argparse.Namespace) -> list[Training]:
    """All trainings, each once, in the campaign's order and seed by seed within an entry."""
    found: dict[Key, Training] = {}
    for entry in campaign:
        if options.only and entry.model not in options.only.split(","):
            continue
        epochs = options.epochs or entry.epochs
        for seed in entry.seeds:
            for name in entry.schemes.split():
                words: Row = {"epochs": epochs, "batch": entry.batch, "lr": entry.lr, "image_size": entry.image_size}
                words |= {"tf32": True, "channels_last": True}
                density = entry.density if (name, seed) == ("fp32", 0) else 0
                data = Path(options.data).name
                settings = AccuracySettings(entry.model, data, (name,), density=density, **words)
                training = Training(settings, seed)
                found.setdefault(training.key, training)
    return list(found.values())


def train(training: Training, device: str, images: Images) -> None:
    """One training, in a process of its own."""
    settings = replace(training.settings, device=device)
    Accuracy(settings, training.folder, images).train(settings.schemes[0], training.seed)


class Campaign:
    """Carries trainings out, until a moment of ``time.monotonic``; ``before``: the rows that ``out`` keeps."""

    def __init__(self, todo: list[Training], before: list[Row], out: Path, until: float) -> None:
        self._waiting, self._before, self._out, self._until = todo, before, out, until
        self._begun: list[Training] = []
        self._running: list[Training] = []
        self._written = self._stopped = time.monotonic()
        self.failed = 0

    def run(self, images: dict[int, Images], jobs: int, device: str, scratch: Path) -> None:
        """Begins what can end in time, until nothing is left or the time is over; ``images`` by their size."""
        context = multiprocessing.get_context("fork")
        while time.monotonic() < self._until:
            while len(self._running) < jobs and (training := self._next()):
                training.folder = scratch / str(len(self._begun))
                training.process = context.Process(
                    target=train, args=(training, device, images[training.settings.image_size]), daemon=True
                )
                training.process.start()
                self._begun.append(training)
                self._running.append(training)
            if not self._running:
                break
            time.sleep(POLL_S)
            self._look()
        for training in self._running:
            self._end(training)
        self._write()

    def _next(self) -> Training | None:
        """The first of those that wait and can end in time."""
        left_s = self._until - time.monotonic()
        epoch_s = {t.settings.model: t.epoch_s() for t in self._begun if t.epoch_s()}
        for training in self._waiting:
            if training.settings.epochs * epoch_s.get(training.settings.model, 0.0) < left_s:
                self._waiting.remove(training)
                return training
        return None

    def _look(self) -> None:
        """Takes note of what has ended, stops the last where the first is late, writes from time to time."""
        now = time.monotonic()
        for training in [t for t in self._running if not t.process.is_alive()]:
            self._running.remove(training)
            self._tell(training, "failed" if training.process.exitcode else "done")
            self.failed += training.process.exitcode != 0
        if len(self._running) > 1 and now > self._stopped + STOP_S:
            if self._running[0].left_s() > self._until - now:
                self._end(self._running.pop())
                self._stopped = now
        if now > self._written + WRITE_S:
            self._write()

    def _end(self, training: Training) -> None:
        training.process.kill()
        training.process.join()
        self._tell(training, "stopped")

    def _tell(self, training: Training, what: str) -> None:
        rows = training.epochs()
        figures = f"{100 * rows[-1]['accuracy']:.2f} %, {rows[-1]['seconds']:.1f} s an epoch" if rows else ""
        left_s = self._until - time.monotonic()
        print(f"{left_s:6.0f} s left  {what:7}  {training.key}  {len(rows)} epochs  {figures}", flush=True)

    def _write(self) -> None:
        """The file takes the place of the one before in a single rename."""
        rows = self._before + [row for training in self._begun for row in training.rows()]
        beside = self._out.with_suffix(".new")
        beside.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        os.replace(beside, self._out)
        self._written = time.monotonic()


def _memory() -> Path | None:
    """A file system in memory, where it has room for checkpoints, which nobody reads."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > 2**33 else None


def main(argv: list[str] | None = None) -> int:
    """The command line; exit status 1 where a training failed."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="bench.accuracy", description=__doc__)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--max-s", type=float, default=540.0)
    parser.add_argument("--only", default="", help="networks, with commas between")
    parser.add_argument("--epochs", type=int, default=0, help="in place of the campaign's")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = files.read(options.out) if options.out.exists() else []
    before = [row for row in rows if row["finished"]]
    done = {(row["model"], row["scheme"], row["seed"]) for row in before}
    todo = [training for training in trainings(CAMPAIGN, options) if training.key not in done]
    images = {size: device_images(options.data, size) for size in {t.settings.image_size for t in todo}}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    print(f"{len(done)} trainings are done, {len(todo)} to do, images {time.monotonic() - began:.0f} s", flush=True)
    campaign = Campaign(todo, before, options.out, began + options.max_s)
    with tempfile.TemporaryDirectory(dir=_memory()) as scratch:
        campaign.run(images, options.jobs, options.device, Path(scratch))
    return int(campaign.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
