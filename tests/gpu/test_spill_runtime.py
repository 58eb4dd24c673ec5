"""Training within forecasts on CUDA: the host waits for nothing; what was denser comes back through its memory."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import gistkit
from gistkit import zoo
from gistkit.codecs import CODECS, Sparse
from gistkit.runtime.attach import compressed_forward
from gistkit.runtime.engine import LAG
from gistkit.runtime.sparse_sizes.exact import FIRST, ExactPacker, Forecast
from gistkit.runtime.sparse_sizes.spill import Spill
from tests.gpu.waiting import no_synchronisation
from tests.runtime.sparse_sizes.test_spill import lent_bytes
from tests.support.tensors import same_bits, values_of

pytestmark = pytest.mark.usefixtures("deterministic_cudnn")

DEVICE = "cuda"
SLEEP_CYCLES = 1_500_000_000  # about 0.8 s at 2 GHz, many times what the host takes for a step
BATCH, SIZE, WIDTH, LAYERS = 32, 64, 32, 9
WITHIN = [name for name, c in CODECS.items() if isinstance(c, Sparse) and c.packs_within]


@contextmanager
def ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.cuda.Event]:
    """The device has much to do first; whatever makes the host wait for it raises. Gives the event of that."""
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    done = torch.cuda.Event()
    done.record()
    with monkeypatch.context() as patched, no_synchronisation():
        for kind, name in ((torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize")):
            patched.setattr(kind, name, _waits)
        patched.setattr(torch.cuda, "synchronize", _waits)
        yield done
    torch.cuda.synchronize()


def _waits(*_: object) -> None:
    raise AssertionError("the host waits for the device")


def chain(bias: float = 0.0) -> nn.Module:
    """ReLUs between convolutions, whose outputs backward reads by sign and by value; the layers of a negative bias keep
    their shares of non-zeros, from a third to none, so that zvc and csr both come by."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(LAYERS):
        conv = nn.Conv2d(3 if i == 0 else WIDTH, WIDTH, 3, padding=1)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        nn.init.constant_(conv.bias, bias)
        layers += [conv, nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10)).to(DEVICE).train()


def vgg() -> nn.Module:
    torch.manual_seed(0)
    return zoo.vgg16(num_classes=10, image_size=32).to(DEVICE).train()


def batch(seed: int, rows: int = BATCH, size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(seed))
    return x.to(DEVICE), (torch.arange(rows) % 10).to(DEVICE)


def brighten(model: nn.Module, shift: float) -> None:
    """Add to the biases: the ReLUs let more pass."""
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d) and layer.bias is not None:
                layer.bias.add_(shift)


def forward(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor], seed: int = 0) -> torch.Tensor:
    torch.cuda.manual_seed(seed)  # dropout's
    model.zero_grad(set_to_none=True)
    return F.cross_entropy(model(data[0]), data[1])


def updated(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """Backward and an SGD step: (loss, gradients)."""
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    with torch.no_grad():
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.add_(grad, alpha=-0.01)
    return [loss.detach(), *grads]


def step(model: nn.Module, seed: int, **words: int) -> list[torch.Tensor]:
    return updated(model, forward(model, batch(seed, **words), seed))


def engine_of(model: nn.Module):
    stand_in = compressed_forward(model)
    assert stand_in is not None
    return stand_in.engine


def equal(found: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("name", WITHIN)
def test_spans_are_used_again_in_the_order_of_the_stream_with_the_host_ahead(name, monkeypatch):
    told: list[float] = []
    forecast = Forecast(0.05, told.append)
    spill, codec = Spill(), CODECS[name]
    packer = ExactPacker(lag=LAG, bounded=True, spill=spill)
    xs = [values_of(200_000 + 777 * i, torch.float32, i, 0.4, False).nan_to_num().to(DEVICE) for i in range(8)]
    for x in xs:  # compiles the kernels, and asks for the memory
        codec.decode(packer.encode(CODECS[name], x, forecast=forecast))
    torch.cuda.synchronize()
    packer.poll()
    told.clear()
    held_bytes, outs = spill.held_bytes, []
    with ahead(monkeypatch) as done:
        for x in xs:
            outs.append(codec.decode(packer.encode(CODECS[name], x, forecast=forecast)))
        assert not done.query() and told == []
        assert lent_bytes(spill) == 0 and spill.held_bytes == held_bytes  # each had the place of the one before
    assert packer.poll() == 0 and not packer.waits
    assert told == [codec.encode(x.cpu()).nonzeros / x.numel() for x in xs]
    for x, out in zip(xs, outs, strict=True):
        assert same_bits(out, codec.decode(codec.encode(x)))


@pytest.mark.parametrize(("make", "words"), [(chain, {}), (vgg, {"rows": 32, "size": 32})], ids=["chain", "vgg16"])
def test_from_the_third_step_on_the_host_waits_for_nothing(make, words, monkeypatch):
    warm = gistkit.compress(make())
    for seed in range(6):  # compiles every kernel of the steps to come
        step(warm, seed, **words)
    plain, model = make(), gistkit.compress(make())
    for seed in range(6):
        want, data = step(plain, seed, **words), batch(seed, **words)
        if seed < 2:
            assert equal(updated(model, forward(model, data, seed)), want)
            continue
        waits = engine_of(model)._packer.waits.copy()
        with ahead(monkeypatch) as done:
            loss = forward(model, data, seed)
            assert not done.query()  # else the test shows nothing
            found = updated(model, loss)
        assert equal(found, want) and engine_of(model)._packer.waits == waits
        assert waits.keys() <= {FIRST}
    assert any(r.codec == "zvc" for r in gistkit.report(model).stats.rows)
    assert not any("waited" in note for note in gistkit.report(model).notes)


def measured(model: nn.Module, seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], int, int]:
    """(loss and gradients, bytes kept after the forward, the forward's peak) with the host far ahead."""
    data = batch(seed)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with ahead(monkeypatch) as done:
        loss = forward(model, data, seed)
        kept, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        assert not done.query()
        found = updated(model, loss)
    return found, kept - before, peak - before


def test_a_host_far_ahead_holds_one_scratch_and_what_was_forecast(monkeypatch):
    free, unbounded = gistkit.compress(chain()), gistkit.compress(chain())
    engine_of(unbounded)._packer = ExactPacker(lag=LAG)
    for seed in range(3):
        step(free, seed)
        step(unbounded, seed)
    found, kept, peak = measured(free, 3, monkeypatch)
    want, scratches_kept, scratches_peak = measured(unbounded, 3, monkeypatch)
    assert equal(found, want)
    n, zvc = BATCH * WIDTH * SIZE**2, CODECS["zvc"]
    assert isinstance(zvc, Sparse)
    rows = [r for r in gistkit.report(free).stats.rows if r.codec == "zvc"]
    saved = sum(zvc.scratch_bytes(n, torch.float32) - r.kept_bytes for r in rows)
    assert len(rows) >= 6 and saved > len(rows) * n  # at least a quarter of each
    # the allocator leaves up to 1 MiB unsplit after a large block
    assert scratches_kept - kept > saved - len(rows) * 2**20
    assert scratches_peak - peak > saved - (len(rows) + 1) * 2**20 - zvc.scratch_bytes(n, torch.float32)
    print(f"\nkept {kept}, peak {peak}; unbounded {scratches_kept}, {scratches_peak}")


# Where next to nothing is stored a lossy plan takes lossless csr, by densities that may have come a step later.
@pytest.mark.parametrize(("lossy", "bias"), [(None, -0.5), ("fp16", 0.0), ("fp8", 0.0)])
def test_a_jump_of_density_goes_through_the_hosts_memory_and_every_bit_is_the_same(lossy, bias, monkeypatch):
    model, warm = (gistkit.compress(chain(bias), lossy=lossy) for _ in range(2))
    plain = chain(bias) if lossy is None else gistkit.compress(chain(bias), lossy=lossy)
    if lossy is not None:
        engine_of(plain)._packer = ExactPacker(lag=LAG, bounded=True)
    for seed in range(7):
        if seed == 3:
            brighten(warm, 1.0)
        step(warm, seed)
    for seed in range(7):
        if seed == 3:
            brighten(plain, 1.0)
            brighten(model, 1.0)
        want, data = step(plain, seed), batch(seed)
        if seed < 2:
            assert equal(updated(model, forward(model, data, seed)), want)
            continue
        with ahead(monkeypatch) as done:
            loss = forward(model, data, seed)
            assert not done.query()
            found = updated(model, loss)
        assert equal(found, want)
        notes = " ".join(gistkit.report(model).notes)
        # the steps after the jump move by more than the margin too, now and then
        assert seed != 3 or "denser than the steps before" in notes
        assert "waited" not in notes
        assert lent_bytes(engine_of(model)._packer._spill) == 0


def test_memory_is_not_anothers_while_the_device_has_to_use_it_though_the_model_is_gone(monkeypatch):
    plain, model = chain(-0.5), gistkit.compress(chain(-0.5))
    for seed in range(3):
        step(plain, seed)
        step(model, seed)
    for m in (plain, model):
        brighten(m, 1.0)
    want, data = step(plain, 3), batch(3)
    packer = engine_of(model)._packer
    torch.cuda.synchronize()
    packer.poll()
    assert lent_bytes(packer._spill) == 0
    spans = [span for free in packer._spill._free.values() for span in free]
    sizes = [span.numel() for span in spans]
    storages = [StorageWeakRef(span.untyped_storage()) for span in spans]
    del packer, spans
    with ahead(monkeypatch) as done:
        found = updated(model, forward(model, data, 3))
        gistkit.restore(model)
        del model, m
        gc.collect()
        assert not done.query() and all(storage.expired() for storage in storages)
        others = [torch.full((size,), 255, dtype=torch.uint8).pin_memory() for size in sizes for _ in range(2)]
    assert equal(found, want) and len(others) == 2 * len(sizes) > 0


def test_streams_have_memory_of_their_own():
    plain, model = chain(-0.5), gistkit.compress(chain(-0.5))
    side = torch.cuda.Stream()
    for seed in range(5):
        if seed == 3:
            brighten(plain, 1.0)
            brighten(model, 1.0)
        want, data = step(plain, seed), batch(seed)
        torch.cuda.synchronize()
        with torch.cuda.stream(side if seed % 2 else torch.cuda.current_stream()):
            found = updated(model, forward(model, data, seed))
        torch.cuda.synchronize()
        assert equal(found, want)
    assert len({stream for stream, _ in engine_of(model)._packer._spill._free}) == 2
