"""HiGHS (scipy's milp), in a process of its own.

A planner runs where somebody trains, and HiGHS is native code: version 1.12 (SciPy 1.17) has crashed at its time limit,
on a program of a SqueezeNet in about every second run, and prints past Python to standard output. In a process of its
own a crash is a program that was not solved, and what is printed goes nowhere. Version 1.8 (SciPy 1.15 and 1.16) has
called a program infeasible that has solutions. So what presolving leads to is asked again without it where that is a
crash, or that there is no solution.

A process is started when the first program is solved, kept for the next ones, and ends with this one. It imports numpy
and scipy, of gistkit nothing.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

INFEASIBLE, OTHER = 2, 4
"""Of the values of ``status``."""
PATIENCE_S = 60.0
"""How much longer than its time limit a program may take before its process is ended."""
LEAST_S = 0.05
"""The least time limit that a program is given."""
_CHILD = Path(__file__).with_name("child.py")


@dataclass(frozen=True)
class Found:
    """What scipy's milp says: its status, the columns (None: no solution was found), the figure, the dual bound."""

    status: int
    x: np.ndarray | None = None
    fun: float | None = None
    bound: float | None = None


class _Child:
    """A process that solves one program at a time."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._end = weakref.finalize(self, _end, self._process, self.owner)
        self._send(list(sys.path))

    def _send(self, item: Any) -> None:
        assert self._process.stdin is not None
        pickle.dump(item, self._process.stdin, pickle.HIGHEST_PROTOCOL)
        self._process.stdin.flush()

    def solve(self, words: Mapping[str, Any], most_s: float) -> Found | None:
        """The program's result; None where the process has crashed, or was ended as it took too long."""
        assert self._process.stdout is not None
        watch = threading.Timer(most_s, self._process.kill)
        watch.daemon = True
        watch.start()
        try:
            self._send(words)
            return Found(*pickle.load(self._process.stdout))
        except (EOFError, OSError, pickle.UnpicklingError):
            self.close()
            return None
        finally:
            watch.cancel()

    def close(self) -> None:
        self._end()


def _end(process: subprocess.Popen, owner: int) -> None:
    forked = os.getpid() != owner  # then it is the other's process: there is nothing to wait for
    if forked:
        process.returncode = 0
    else:
        process.kill()
        process.wait()
    pipes: tuple[Any, ...] = (process.stdin, process.stdout)
    for pipe in pipes:
        pipe.raw.close()  # whatever has not been sent is not wanted any more


_idle: list[_Child] = []
"""Processes that wait for a program; every thread that solves one takes one out, and puts it back."""


def prepare() -> None:
    """Start a process if none waits: it takes half a second until it can solve something."""
    child = _taken()
    if child is not None:
        _idle.append(child)


def solve(words: Mapping[str, Any], limit_s: float) -> Found:
    """scipy's milp of the arguments ``words`` within ``limit_s`` seconds; without its options. A program is infeasible
    where two ways of solving it say so in that time; else, and of one that crashes, nothing is known (``OTHER``)."""
    until, presolve = time.monotonic() + limit_s, True
    left_s = max(limit_s, LEAST_S)
    infeasible = False
    while left_s >= LEAST_S:
        options = {**words.get("options", {}), "time_limit": left_s, "presolve": presolve}
        found = _solved({**words, "options": options}, left_s + PATIENCE_S)
        if found is not None and (found.status != INFEASIBLE or infeasible):
            return found
        if not presolve:
            break
        infeasible, presolve, left_s = found is not None, False, until - time.monotonic()
    return Found(OTHER)


def _solved(words: Mapping[str, Any], most_s: float) -> Found | None:
    child = _taken()
    if child is None:
        return _here(words)
    found = child.solve(words, most_s)
    if found is not None:
        _idle.append(child)
    return found


def _taken() -> _Child | None:
    """A process for one program; None where this one is no Python that could start another."""
    while _idle:
        child = _idle.pop()
        if child.owner == os.getpid():  # else this process is a fork of the one whose child it is
            return child
    if not Path(sys.executable or "").name.lower().startswith("python"):
        return None
    try:
        return _Child()
    except OSError:
        return None


def _here(words: Mapping[str, Any]) -> Found:
    from scipy.optimize import milp

    found = milp(**words)
    return Found(found.status, found.x, found.fun, getattr(found, "mip_dual_bound", None))


__all__ = ["INFEASIBLE", "Found", "prepare", "solve"]
