"""What an accuracy experiment leaves in its folder, in an order that a kill at any moment does not spoil.

| file | holds |
|---|---|
| ``rows.jsonl`` | a row an epoch of every (scheme, seed), with all settings |
| ``density.jsonl`` | a row a kept tensor and measured step |
| ``SCHEME-SEED.pt`` | model and optimiser at the end of an unfinished run's last epoch; gone when the run is done |

An epoch's rows are appended first, then the checkpoint takes the place of the one before in a single rename. What was
appended after the last checkpoint is removed when the run is taken up again, and its epoch is trained anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
ROWS, DENSITY = "rows.jsonl", "density.jsonl"


class Records:
    """The rows and checkpoints of one folder, which is made. ``about``: the settings that all its rows share.

    Raises ValueError where the folder has rows of other settings, or a file in it is none of these. One process at a
    time may write to it.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], epochs: int) -> None:
        self._folder, self._about, self._epochs = folder, json.loads(json.dumps(dict(about))), epochs
        folder.mkdir(parents=True, exist_ok=True)
        for row in self.rows():
            for name, value in self._about.items():
                if row.get(name) != value:
                    raise ValueError(
                        f"out: {folder / ROWS} must hold rows of these settings, got {name} {row.get(name)!r} there "
                        f"and {value!r} here; name another folder, or take the settings from there"
                    )

    def rows(self) -> list[Row]:
        """All epochs so far."""
        return _read(self._folder / ROWS)

    def densities(self) -> list[Row]:
        """All densities so far."""
        return _read(self._folder / DENSITY)

    def resumed(self, scheme: str, seed: int, device: str) -> tuple[int, Row | None]:
        """(the epoch to go on with, the checkpoint's content) of a run: (0, None) for a new one, (epochs, None) for one
        that is done. Rows of epochs that come again are removed."""
        done = {row["epoch"] for row in self.rows() if _is_of(row, scheme, seed)}
        file = self._checkpoint(scheme, seed)
        if done == set(range(self._epochs)):
            file.unlink(missing_ok=True)
            return self._epochs, None
        state = torch.load(file, map_location=device, weights_only=True) if file.exists() else None
        if state is None or not done.issuperset(range(state["epoch"])):
            state = None
        epoch = 0 if state is None else state["epoch"]
        for name in (ROWS, DENSITY):
            _keep(self._folder / name, lambda row: not _is_of(row, scheme, seed) or row["epoch"] < epoch)
        return epoch, state

    def add(self, row: Row, densities: Iterable[Row], state: Callable[[], Row]) -> None:
        """Write down a finished epoch; ``state`` gives what the next one begins with."""
        _append(self._folder / DENSITY, densities)
        _append(self._folder / ROWS, [{**self._about, **row}])
        file = self._checkpoint(row["scheme"], row["seed"])
        if row["epoch"] == self._epochs - 1:
            file.unlink(missing_ok=True)
            return
        beside = file.with_suffix(".new")
        torch.save({**state(), "epoch": row["epoch"] + 1}, beside)
        os.replace(beside, file)

    def _checkpoint(self, scheme: str, seed: int) -> Path:
        return self._folder / f"{scheme.replace(':', '-')}-{seed}.pt"


def _is_of(row: Row, scheme: str, seed: int) -> bool:
    return row["scheme"] == scheme and row["seed"] == seed


def _read(file: Path) -> list[Row]:
    """The rows of a file; one that was cut short by a kill, the last, is left out."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    try:
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except ValueError as error:
        raise ValueError(f"out: {file} must hold a JSON row a line ({error}); remove it, or name another") from error


def _keep(file: Path, wanted: Callable[[Row], bool]) -> None:
    if file.exists():
        beside = file.with_suffix(".new")
        beside.write_text("".join(f"{json.dumps(row)}\n" for row in _read(file) if wanted(row)), encoding="utf-8")
        os.replace(beside, file)


def _append(file: Path, rows: Iterable[Row]) -> None:
    text = "".join(f"{json.dumps(row, allow_nan=False)}\n" for row in rows)
    if text:
        with file.open("a", encoding="utf-8") as opened:
            opened.write(text)
