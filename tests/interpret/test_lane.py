"""Packed items in a lane: the kernels in the interpreter are equal to the oracle, byte for byte."""

import pytest
import torch

from gistkit.kernels import STRIDES, known_bytes, packed_bytes
from gistkit.kernels.reference import lane as oracle
from gistkit.kernels.reference import sparse
from gistkit.kernels.sparse import lane as kernels

DTYPES = {"raw": torch.float32, "fp16": torch.bfloat16, "fp8": torch.float32}


def slots(layout: str, fmt: str, n: int, density: float):
    x = torch.randn(n).to(DTYPES[fmt]) * (torch.rand(n) < density)
    index, counts, scratch = getattr(sparse, f"{layout}_encode")(x, fmt)
    return scratch, index, counts, STRIDES[layout]


@pytest.mark.parametrize("layout, fmt", [("zvc", "raw"), ("zvc", "fp8"), ("csr", "fp16")])
def test_encodings_one_behind_the_other(layout, fmt):
    cases = [slots(layout, fmt, *case) for case in ((5000, 0.5), (3000, 0.0), (20_000, 0.02), (1, 1.0), (10_000, 1.0))]
    made = []
    for module in (kernels, oracle):
        lane = torch.full((512 * 600,), 7, dtype=torch.uint8)
        cells, places = torch.full((len(cases) + 1, 1), 1024), torch.zeros(len(cases), 2, dtype=torch.int64)
        for case, begin, after, place in zip(cases, cells, cells[1:], places, strict=False):
            module.ship(*case, lane, begin, after, place)
        made.append((lane, cells, places))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    lane, cells, places = made[0]
    item, pair = cases[0][0].element_size(), layout == "csr"
    known = [known_bytes(len(counts), stride) for _, _, counts, stride in cases]
    assert int(cells[0]) == 1024 and int(cells[-1]) == 1024 + sum(known) + sum(
        packed_bytes(int(total), item, pair) for _, total in places
    )
    for case, place, known_size in zip(cases, places, known, strict=True):
        scratch, index, counts, stride = case
        columns = index if pair else None
        rest = torch.cat([t.view(torch.uint8) for t in ((counts,) if pair else (index, counts))])
        outs = []
        for module in (kernels, oracle):
            values = torch.zeros_like(scratch)
            to = None if columns is None else torch.zeros_like(columns)
            here = torch.zeros(known_size, dtype=torch.uint8)
            module.unship(lane, place, here, values, to)
            assert torch.equal(here[: len(rest)], rest)
            outs.append((values, to))
        total = int(counts.sum())
        assert torch.equal(outs[0][0].view(torch.uint8), outs[1][0].view(torch.uint8))
        expected = sparse.compact(scratch, counts, stride, total)
        assert torch.equal(outs[0][0][:total].view(torch.uint8), expected.view(torch.uint8))
        if columns is not None:
            assert torch.equal(outs[0][1][:total], sparse.compact(columns, counts, stride, total))


def test_no_slots_take_no_room():
    begin, after, place = torch.full((1,), 512), torch.zeros(1, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    empty = torch.empty(0), torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int16), 1024
    for module in (kernels, oracle):
        memory = torch.zeros(1024, dtype=torch.uint8)
        module.ship(*empty, memory, begin, after.zero_(), place.fill_(1))
        assert (int(begin), int(after)) == (512, 512) and place.tolist() == [512, 0]


@pytest.mark.parametrize(
    "counts", ([0] * 3000 + [1024], [1024] + [0] * 1500 + [7], [1] * 2100, [0] * 1023 + [9], [3, 0] * 500)
)
def test_uneven_slots(counts, monkeypatch):
    """Blocks over thousands of empty slots, and counts of more than one program and one round, and of one launch."""
    monkeypatch.setattr(kernels, "ROUND", 1024)
    counts = torch.tensor(counts, dtype=torch.int16)
    scratch = torch.randint(0, 255, (1024 * len(counts),), dtype=torch.uint8)
    words, made = torch.randint(-(2**31), 2**31 - 1, (32 * len(counts),), dtype=torch.int32), []
    for module in (kernels, oracle):
        lane = torch.zeros(8192 + known_bytes(len(counts), 1024), dtype=torch.uint8)
        begin, after, place = torch.full((1,), 512), torch.full((1,), 1), torch.zeros(2, dtype=torch.int64)
        module.ship(scratch, words, counts, 1024, lane, begin, after, place)
        made.append((lane, after, place))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
