"""Host memory for what a forecast has no room for: who has which bytes, for how long, and how many there may be."""

import gc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import patch

import psutil
import torch
from hypothesis import given
from hypothesis import strategies as st

from gistkit.runtime.offload.host_memory import available_bytes
from gistkit.runtime.sparse_sizes import spill
from gistkit.runtime.sparse_sizes.spill import Spill

X = torch.zeros(1)
MIB = 2**20


def pageable(nbytes, _):
    return torch.empty(nbytes, dtype=torch.uint8)


def owner(limit_bytes=256 * MIB, make=pageable):
    """A spill of memory of the CPU's, and the sizes that it has asked for."""
    asked = []

    def made(nbytes, device):
        asked.append(nbytes)
        return make(nbytes, device)

    return Spill(made, lambda _, held_bytes: limit_bytes), asked


def lent_bytes(s):
    """What of its memory is in use."""
    with s._lock:
        s._collect()
        return s.held_bytes - sum(m.numel() for spans in s._free.values() for m in spans)


@patch.object(spill, "LEAST_BYTES", 2**10)
@given(st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 7)), max_size=40))
def test_every_span_is_its_owners_alone_until_it_dies(steps):
    s, asked = owner()
    held = {}
    for number, (nbytes, victim) in enumerate(steps):
        memory = s.take(nbytes, X)
        assert memory.dtype is torch.uint8 and memory.numel() >= nbytes
        memory.fill_(number)
        held[number] = memory
        del memory
        held.pop(victim, None)
        assert all(bool((held[other] == other).all()) for other in held)
        assert lent_bytes(s) == sum(m.numel() for m in held.values())
    held.clear()
    whole = s.held_bytes
    assert lent_bytes(s) == 0 and whole == sum(asked)
    again = [s.take(size, X) for size in asked]
    assert s.held_bytes == whole == sum(m.numel() for m in again)  # none is lost


def test_there_is_no_more_than_the_limit_and_less_where_the_host_has_less():
    s, asked = owner(limit_bytes=3 * MIB)
    held = [s.take(MIB, X), s.take(MIB // 2 + 1, X)]
    assert s.take(2 * MIB, X) is None and asked == [MIB, MIB]
    held.pop()
    assert s.take(2 * MIB, X) is not None and s.held_bytes == 3 * MIB  # in place of what was free

    def short(nbytes, _):
        if nbytes > MIB:
            raise RuntimeError("CUDA error: out of memory")
        return torch.empty(nbytes, dtype=torch.uint8)

    s, asked = owner(make=short)
    assert s.take(2 * MIB, X) is None and s.held_bytes == 0 and s.take(MIB, X) is not None
    assert asked == [2 * MIB, MIB]


def test_a_stream_does_not_get_what_another_one_may_still_read(monkeypatch):
    s, asked = owner()
    monkeypatch.setattr(spill, "stream_of", lambda x: "first")
    there = s.take(MIB, X).data_ptr()
    monkeypatch.setattr(spill, "stream_of", lambda x: "second")
    other = s.take(MIB, X)
    assert other.data_ptr() != there and len(asked) == 2
    monkeypatch.setattr(spill, "stream_of", lambda x: "first")
    assert s.take(MIB, X).data_ptr() == there and len(asked) == 2


def test_spans_may_die_while_memory_is_being_made_and_in_other_threads():
    held = []

    def making(nbytes, _):
        held.clear()  # as a garbage collection might, with the lock held
        return torch.empty(nbytes, dtype=torch.uint8)

    s, _ = owner(make=making)
    held += [s.take(MIB, X)]
    more = s.take(MIB, X)
    assert not held and lent_bytes(s) == more.numel()

    def worker(number):
        spans = (s.take(1000 * (i % 7), X).fill_(number) for i in range(200))
        return all(bool((mine == number).all()) for mine in spans)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(worker, range(4)))
    assert lent_bytes(s) == more.numel()


def test_memory_goes_with_its_owner_and_the_last_span():
    s, _ = owner()
    gc.disable()  # no cycle keeps it
    try:
        memory = s.take(1000, X).fill_(7)
        storage = memory.untyped_storage()._weak_ref()
        del s
        assert bool((memory == 7).all())
        del memory
        assert torch.UntypedStorage._new_with_weak_ptr(storage) is None
    finally:
        gc.enable()
        torch.UntypedStorage._free_weak_ref(storage)


def files(root, texts):
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_free_memory_is_the_least_of_the_machines_and_the_containers(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4_000_000))
    unlimited = {"memory.max": "max\n", "memory.current": "77\n", "memory.stat": "anon 5\n"}
    assert available_bytes(files(tmp_path / "free", unlimited)) == available_bytes(tmp_path / "none") == 4_000_000
    used = "anon 5\nactive_file 9\ninactive_file 50000\n"
    second = {"memory.max": "1000000\n", "memory.current": "700000\n", "memory.stat": used}
    assert available_bytes(files(tmp_path / "v2", second)) == 350_000
    first = {"memory.limit_in_bytes": "500000\n", "memory.usage_in_bytes": "600000\n", "memory.stat": ""}
    assert available_bytes(files(tmp_path / "v1/memory", first).parent) == 0
