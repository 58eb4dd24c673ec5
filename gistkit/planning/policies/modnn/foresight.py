"""moDNN's look ahead (DATE 2018, Algorithm 1, line 16): whether what a future task needs will find room.

A guess, on a copy of the places: tasks run without workspaces and as if no offload caused delay. In a large step a
guess spans thousands of tasks and thousands of guesses are made; nearly always everything finds room as it is. So the
memory map alone is followed as long as that is so, and who is where is made up for only where something has to leave.
"""

from __future__ import annotations

from collections.abc import Iterable

from gistkit.planning.policies.modnn.lives import Lives
from gistkit.planning.policies.modnn.state import TRANSIENT, Places


def foreseen(places: Places, made: Iterable[int], t: int, s: int) -> bool:
    """Whether inputs and outputs of s will find room without defragmentation: what s needs is fetched before task t,
    which has ``made`` its outputs, then the tasks up to s run."""
    guess = places.copy()
    fetched = [b for b in guess.missing(s) if b in guess.host]
    if not all(enter(guess, block, guess.nbytes(block), t, s) for block in fetched):
        return False  # line 25: neither room nor a scheme
    guess.retire(t, made)
    task = _glide(guess, t + 1, s)
    return all(_run(guess, u) for u in range(task, s + 1))


def fitting(places: Places, blocks: Iterable[int], t: int, s: int) -> set[int]:
    """Which of the blocks that task s fetches find room before task t, one after the other; ``places`` change."""
    return {b for b in blocks if b in places.host and enter(places, b, places.nbytes(b), t, s)}


def enter(places: Places, block: int, nbytes: int, task: int, until: int = -1) -> bool:
    """Take room for a block on a copy of the places, as if no offload caused delay; False: no way."""
    scheme = places.scheme(nbytes, task, None, until)
    if scheme is None:
        return False
    for other in scheme:
        places.leave(other)
    places.enter(block, nbytes)
    return True


def _run(guess: Places, task: int) -> bool:
    """Run a task on a guess; False where something that it needs finds no room."""
    missing = guess.missing(task)
    born = {b for b in missing if b not in guess.host}
    wanted = [(b, guess.nbytes(b)) for b in missing]
    if guess.lives.transient_bytes[task]:
        wanted.append((TRANSIENT, guess.lives.transient_bytes[task]))
    if not all(enter(guess, block, nbytes, task) for block, nbytes in wanted):
        return False
    guess.retire(task, born)
    return True


def _glide(guess: Places, first: int, last: int) -> int:
    """Run tasks from the first to the last as long as what they need fits as it is and nothing of it is in host memory;
    the one before which that ended (last + 1: it did not). What tasks make and free themselves leaves no trace."""
    lives, memory, host = guess.lives, guess.map, guess.host
    for task in range(first, last + 1):
        born = []
        for block in lives.starting[task]:
            if block in memory:
                continue
            if block in host or memory.allocate(block, lives.lives[block].nbytes, "best") is None:
                break
            born.append(block)
        else:
            if memory.largest_free_bytes >= lives.transient_bytes[task]:
                for block in lives.ending[task]:
                    memory.free(block)
                continue
        for block in born:
            memory.free(block)
        _make_up(guess, lives, first, task)
        return task
    return last + 1


def _make_up(guess: Places, lives: Lives, first: int, end: int) -> None:
    """Who is where before task ``end``, if nothing has left since task ``first``."""
    for task in range(first, end):
        born = [b for b in lives.starting[task] if b not in guess.here]
        for block in born:
            guess.arrive(block)
        guess.used(task, born)
