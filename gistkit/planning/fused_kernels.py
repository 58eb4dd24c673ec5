"""The most bytes alive at a kernel of a compiled graph, in the order in which Inductor runs those that it fuses.

A buffer is freed behind the last kernel that reads it; a pointwise kernel that reads one of its size for the last time
writes to that. Pure data: :mod:`gistkit.compiled.memory` describes the kernels."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection
from itertools import islice
from typing import NamedTuple

_SMALL = 6  # what joins kernels is more than a 64th of the largest tensor
_READS = 8  # Inductor's realize_acc_reads_threshold: of more it makes two kernels, fused, whose second reads no operand
_UNIT, _SEGMENT, _LARGE, _LEFT = 512, 2 * 2**20, 10 * 2**20, 2**20
"""Of PyTorch's CUDACachingAllocator: kMinBlockSize, kRoundLarge, kMinLargeAlloc, kSmallSize."""


class Kernel(NamedTuple):
    """A kernel: the storages that it writes, with their bytes, and reads. ``pointwise``: it makes as many elements as
    it reads. ``fusible``: Inductor writes it itself. ``parts``: how many kernels run in this one; each overwrites an
    operand, but none that is ``shared``, read by several of them. ``passing``: bytes that live only while it runs, as a
    library's workspace."""

    made: dict[int, int]
    reads: frozenset[int]
    pointwise: bool = False
    fusible: bool = False
    parts: int = 1
    shared: frozenset[int] = frozenset()
    passing: int = 0


def block_bytes(size: int) -> int:
    """Bytes that PyTorch's allocator takes for a tensor of so many: a new segment is a multiple of 2 MiB, of which a
    rest of up to 1 MiB is given to no other tensor."""
    size = -(-size // _UNIT) * _UNIT
    rest = -size % _SEGMENT
    return size + rest if size >= _LARGE and rest <= _LEFT else size


def peak(
    kernels: list[Kernel], start: dict[int, int], stay: Collection[int], elsewhere: Collection[int] = (),
    joins: bool = False,
) -> int:  # fmt: skip
    """The most bytes alive at a kernel: ``start`` is there from the beginning, ``stay`` to the end, ``elsewhere`` is
    counted by the caller. Without it the kernels are forward's, whose inputs are not freed: the caller holds them.
    ``joins``: kernels side by side are looked for that run as one. It matters where operands are made in between, as by
    operators that run again; elsewhere it would put peaks as much too high as they are too low without."""
    inputs_stay = not elsewhere
    kernels = _ordered(_late(_joined(_late(kernels), start)) if joins else kernels, {} if inputs_stay else start)
    last = {key: place for place, kernel in enumerate(kernels) for key in (*kernel.made, *kernel.reads)}
    ends: dict[int, list[int]] = {}
    for key, place in last.items():
        if key not in stay and not (inputs_stay and key in start):
            ends.setdefault(place, []).append(key)
    alive, before = dict(start), frozenset[int]()
    total = most = sum(alive.values())
    for place, kernel in enumerate(kernels):
        made = {key: size for key, size in kernel.made.items() if key not in alive and key not in elsewhere}
        freed = ends.get(place, ())
        if kernel.pointwise and len(kernel.reads) <= _READS * kernel.parts:
            # each part overwrites an operand, but none that the kernel before, fused with it, reads
            own = (key for key in freed if key not in before | kernel.shared and alive.get(key) in made.values())
            total -= sum(alive.pop(key) for key in [*islice(own, kernel.parts)])
        before = kernel.reads
        alive |= made
        total += sum(made.values())
        most = max(most, total + kernel.passing)
        for key in freed:
            total -= alive.pop(key, 0)
    return most


def _ordered(kernels: list[Kernel], start: dict[int, int]) -> list[Kernel]:
    """The kernels in an order of less memory, as Inductor looks for: in forward, what makes less than it reads, as a
    mask, right behind that; what nothing else waits for and takes more than what it is made of, as casts of gradients,
    at the end. ``start``: in backward, what can be freed from the beginning on."""
    size = start | {key: size for kernel in kernels for key, size in kernel.made.items()}
    awaited: set[int] = set()
    late = set()
    for i, kernel in reversed([*enumerate(kernels)]):
        if awaited.isdisjoint(kernel.made) and sum(kernel.made.values()) > sum(size.get(k, 0) for k in kernel.reads):
            late.add(i)
        else:
            awaited |= kernel.reads
    places: dict[int, tuple[int, ...]] = {}
    found: list[tuple[tuple[int, ...], int]] = []
    for i, kernel in enumerate(kernels):
        place = (len(kernels), i) if i in late else (i,)
        sources = [key for key in kernel.reads if key in places]
        if place == (i,) and not start and kernel.fusible and any(sum(kernel.made.values()) < size[s] for s in sources):
            place = (*max(places[key] for key in sources), i)
        places.update(dict.fromkeys(kernel.made, place))
        found.append((place, i))
    return [kernels[i] for _, i in sorted(found)]


def _late(kernels: list[Kernel]) -> list[Kernel]:
    """The kernels, with pointwise ones right before their first reader where Inductor writes that too, which makes one
    of both: a sum of gradients in the norm behind it, whose operand is computed again in between."""
    readers: dict[int, int] = {}
    places = [(i, i) for i in range(len(kernels))]
    for i, kernel in reversed([*enumerate(kernels)]):
        first = min((readers[key] for key in kernel.made if key in readers), default=i)
        if kernel.pointwise and kernel.fusible and kernels[first].fusible:
            places[i] = (places[first][0], i)
        readers |= dict.fromkeys(kernel.reads, i)
    return [kernels[i] for _, i in sorted(places)]


def _both(one: Kernel, other: Kernel) -> Kernel:
    """Two fusible kernels as one."""
    shared = one.shared | other.shared | one.reads & other.reads
    pointwise = one.pointwise and other.pointwise
    return Kernel(one.made | other.made, one.reads | other.reads, pointwise, True, one.parts + other.parts, shared)


def _joined(kernels: list[Kernel], start: dict[int, int]) -> list[Kernel]:
    """The kernels, some in one, at the last one's place, as Inductor fuses those of one size that read a tensor as
    large as any of theirs and do not wait for each other: the gradients of both norms behind a residual sum."""
    size = start | {key: size for kernel in kernels for key, size in kernel.made.items()}
    largest = [max((size.get(key, 0) for key in k.reads), default=0) for k in kernels]
    least, maker, behind = max(largest, default=0) >> _SMALL, dict[int, int](), list[int]()
    found, readers = list[Kernel | None](kernels), dict[int, list[int]]()
    for j, kernel in enumerate(kernels):
        sources = {maker[key] for key in kernel.reads if key in maker}
        behind.append(functools.reduce(operator.or_, (behind[s] | 1 << s for s in sources), 0))
        maker |= dict.fromkeys(kernel.made, j)
        wide = {key for key in kernel.reads if size.get(key) == largest[j] > least} if kernel.fusible else ()
        for i in sorted({i for key in wide for i in readers.get(key, ())}, reverse=True):
            other = found[i]
            if other is None or not other.fusible or largest[i] != largest[j] or (behind[j] >> i | behind[i] >> j) & 1:
                continue
            if sum(other.made.values()) == sum(kernels[j].made.values()):
                kernel = _both(other, kernel)
                found[i], found[j] = None, kernel
                either, both = 1 << i | 1 << j, behind[i] | behind[j] | 1 << i | 1 << j
                for k in (k for k in range(j + 1) if k in (i, j) or behind[k] & either):  # they wait for both now
                    behind[k] |= both
        for key in kernel.reads if wide else ():
            readers.setdefault(key, []).append(j)
    order, missing, waiting = list[Kernel](), set(maker), list[Kernel]()
    for kernel in filter(None, found):  # what reads a kernel that was joined to a later one comes behind that
        waiting.append(kernel)
        while ready := next((k for k in waiting if missing.isdisjoint(k.reads - k.made.keys())), None):
            waiting.remove(ready)
            order.append(ready)
            missing.difference_update(ready.made)
    return order
