"""Training within forecasts: from the second step on nobody waits, however late the counts; every bit is plain's."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.codecs import CODECS
from gistkit.runtime.attach import compressed_forward
from gistkit.runtime.engine import LAG
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.sparse_sizes.exact import BY_COUNT, FIRST, MARGIN, ExactPacker
from gistkit.runtime.sparse_sizes.spill import Spill
from gistkit.runtime.stash.verify import same_bits
from tests.runtime.sparse_sizes.test_exact import LateCounts
from tests.runtime.sparse_sizes.test_spill import lent_bytes
from tests.support.models import relu_chain

BATCH, SIZE, WIDTH, LAYERS = 4, 32, 16, 7
SCRATCH_BYTES = CODECS["zvc"].scratch_bytes(BATCH * WIDTH * SIZE**2, torch.float32)


class Trainer:
    """Steps of a compressed model, whose counts arrive when ``arrive`` is called, beside those of a plain copy."""

    def __init__(self, limit_bytes: int = 2**30, spills: bool = True, bias: float = 0.0, **words) -> None:
        self.plain = relu_chain(LAYERS, WIDTH, bias)
        self.model = gistkit.compress(copy.deepcopy(self.plain), **words)
        self.counts = LateCounts()
        self.spill = Spill(lambda n, _: torch.empty(n, dtype=torch.uint8), lambda *_: limit_bytes)
        self.packer = ExactPacker(LAG, True, lambda: self.counts, self.spill if spills else None)
        self.engine._packer = self.packer
        self.live = LiveBytes()

    @property
    def engine(self):
        stand_in = compressed_forward(self.model)
        assert stand_in is not None
        return stand_in.engine

    def step(self, seed: int, shift: float = 0.0) -> None:
        """One step of both on the same batch, ``shift`` added to all biases first, and compared."""
        torch.manual_seed(seed)
        x, t = torch.randn(BATCH, 3, SIZE, SIZE), torch.arange(BATCH)
        losses = []
        for model in (self.plain, self.model):
            model.zero_grad(set_to_none=True)
            with torch.no_grad():
                for layer in model:
                    if isinstance(layer, nn.Conv2d):
                        layer.bias += shift
            if model is self.plain:
                loss = F.cross_entropy(model(x), t)
            else:
                self.live = LiveBytes()
                with self.live:
                    loss = F.cross_entropy(model(x), t)
                    self.live.mark("kept")
            loss.backward()
            losses.append(loss.detach())
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad
        assert same_bits(*losses)
        pairs = zip(self.plain.parameters(), self.model.parameters(), strict=True)
        assert all(same_bits(a.grad, b.grad) for a, b in pairs)

    @property
    def kept_bytes(self) -> int:
        return self.live.marks[0].nbytes

    def notes(self) -> str:
        return " ".join(gistkit.report(self.model).notes)


@pytest.mark.parametrize("behind", [0, 3])
def test_from_the_second_step_on_nobody_waits_however_late_the_counts(behind):
    trainer, starts, first = Trainer(), [], 0
    for step in range(6):
        starts.append(len(trainer.counts.tickets))
        if step > behind:
            for ticket in trainer.counts.tickets[: starts[step - behind]]:
                ticket.arrive()
        trainer.step(step)
        if step == 0:
            first = trainer.counts.waited
    assert trainer.counts.waited == first == starts[1] and trainer.packer.waits == {FIRST: first}
    assert trainer.notes() == "" and len(trainer.counts.tickets) > 5 * first
    trainer.counts.arrive()
    gistkit.report(trainer.model)
    assert lent_bytes(trainer.spill) == 0


def test_kept_bytes_are_the_forecasts_and_one_scratch_lives_at_a_time():
    free, bounded = Trainer(), Trainer(spills=False)
    for step in range(3):
        for trainer in (free, bounded):
            trainer.counts.arrive()
            trainer.step(step)
    # The counts of the last step have not arrived: of the one, four encodings are scratches, of which about half (ReLU)
    # would not be there packed; the other's are all a little longer than that. Beside one scratch there are the ReLU's
    # input and its output.
    assert bounded.kept_bytes - free.kept_bytes > LAG * 0.35 * SCRATCH_BYTES
    rows = [r for r in gistkit.report(free.model).stats.rows if r.codec == "zvc"]
    n, zvc = BATCH * WIDTH * SIZE**2, CODECS["zvc"]
    for row in rows:
        share = free.engine.densities[row.storage]
        assert row.kept_bytes <= zvc.within_bytes(n, torch.float32, zvc.capacity(n, share + MARGIN + 0.01))
    assert len(rows) >= LAYERS - 2 and free.live.peak_bytes <= free.kept_bytes + SCRATCH_BYTES + 2 * 4 * n
    assert free.live.peak_bytes < bounded.live.peak_bytes - 0.35 * SCRATCH_BYTES  # the oldest was packed just before


@pytest.mark.parametrize("when", ["in the step", "a step later"])
def test_a_jump_of_density_goes_through_the_host_once_and_every_bit_is_plains(when):
    trainer = Trainer(bias=-0.1)
    for step in range(3):
        trainer.step(step)
        trainer.counts.arrive()
    assert trainer.notes() == ""
    before = dict(trainer.engine.densities)
    trainer.step(3, shift=0.3)
    if when == "in the step":
        trainer.counts.arrive()
        assert "sparse encodings so far were denser than the steps before" in trainer.notes()
        assert lent_bytes(trainer.spill) == 0  # the backward is over, and nobody wants it any more
    else:
        assert trainer.notes() == ""
    trainer.counts.arrive()
    trainer.step(4)
    trainer.counts.arrive()
    assert any(trainer.engine.densities[s] > share + 0.2 for s, share in before.items())
    beyond = trainer.packer.beyond
    trainer.step(5)
    trainer.counts.arrive()
    assert str(beyond) in trainer.notes() and trainer.packer.beyond == beyond and trainer.packer.waits.keys() == {FIRST}


@pytest.mark.parametrize("lossy", ["fp8", "fp8s"])
def test_lossy_forms_wait_only_where_packing_depends_on_the_count(lossy):
    trainer = Trainer(lossy=lossy)
    x, t = torch.randn(BATCH, 3, SIZE, SIZE), torch.arange(BATCH)
    want = gistkit.compress(relu_chain(LAYERS, WIDTH, 0.0), lossy=lossy)
    for _ in range(3):
        found = []
        for model in (want, trainer.model):
            loss = F.cross_entropy(model(x), t)
            found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
        assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
    waits = trainer.packer.waits
    assert any(r.codec == f"zvc+{lossy}" for r in gistkit.report(trainer.model).stats.rows)
    if lossy == "fp8":
        assert waits.keys() == {FIRST} and trainer.notes() == ""
    else:
        why = BY_COUNT.format(f"zvc+{lossy}")
        assert waits.keys() <= {FIRST, why} and f"times so far: {why}" in trainer.notes()
