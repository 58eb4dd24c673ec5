"""What an accuracy experiment leaves in its folder, in an order that a kill at any moment does not spoil.

| file | holds |
|---|---|
| ``rows.jsonl`` | a row an epoch of every (scheme, seed), with all settings and the densities measured in it |
| ``SCHEME-SEED.pt`` | model and optimiser at the end of an unfinished run's last epoch; gone when the run is done |

An epoch's row is appended first, then the checkpoint takes the place of the one before in a single rename. What was
appended after the last checkpoint is removed when the run is taken up again, and its epoch is trained anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


class Records:
    """The rows and checkpoints of one folder, which is made. ``about``: the settings that all its rows share.

    Raises ValueError where the folder has rows of other settings, or a file in it is none of these. One process at a
    time may write to it.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], epochs: int) -> None:
        self._folder, self._about, self._epochs = folder, json.loads(json.dumps(dict(about))), epochs
        self._file = folder / "rows.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        for row in self.rows():
            for name, value in self._about.items():
                if row.get(name) != value:
                    raise ValueError(
                        f"out: {self._file} must hold rows of these settings, got {name} {row.get(name)!r} there "
                        f"and {value!r} here; name another folder, or take the settings from there"
                    )

    def rows(self) -> list[Row]:
        """All epochs so far. What was cut short by a kill, the last line, is left out."""
        lines = self._file.read_text(encoding="utf-8").splitlines(keepends=True) if self._file.exists() else []
        try:
            return [json.loads(line) for line in lines if line.endswith("\n")]
        except ValueError as error:
            raise ValueError(
                f"out: {self._file} must hold a JSON row a line ({error}); remove it, or name another"
            ) from error

    def resumed(self, scheme: str, seed: int, device: str) -> tuple[int, Row | None]:
        """(the epoch to go on with, the checkpoint's content) of a run: (0, None) for a new one, (epochs, None) for one
        that is done. Rows of epochs that come again are removed."""
        rows = self.rows()
        done = {row["epoch"] for row in rows if (row["scheme"], row["seed"]) == (scheme, seed)}
        file = self._checkpoint(scheme, seed)
        if done == set(range(self._epochs)):
            file.unlink(missing_ok=True)
            return self._epochs, None
        state = torch.load(file, map_location=device, weights_only=True) if file.exists() else None
        if state is None or not done.issuperset(range(state["epoch"])):
            state = None
        epoch = 0 if state is None else state["epoch"]
        kept = [row for row in rows if (row["scheme"], row["seed"]) != (scheme, seed) or row["epoch"] < epoch]
        beside = self._file.with_suffix(".new")
        beside.write_text("".join(f"{json.dumps(row)}\n" for row in kept), encoding="utf-8")
        os.replace(beside, self._file)
        return epoch, state

    def add(self, row: Row, state: Callable[[], Row]) -> None:
        """Write down a finished epoch; ``state`` gives what the next one begins with."""
        with self._file.open("a", encoding="utf-8") as opened:
            opened.write(f"{json.dumps({**self._about, **row}, allow_nan=False)}\n")
        file = self._checkpoint(row["scheme"], row["seed"])
        if row["epoch"] == self._epochs - 1:
            file.unlink(missing_ok=True)
            return
        beside = file.with_suffix(".new")
        torch.save({**state(), "epoch": row["epoch"] + 1}, beside)
        os.replace(beside, file)

    def _checkpoint(self, scheme: str, seed: int) -> Path:
        return self._folder / f"{scheme.replace(':', '-')}-{seed}.pt"
