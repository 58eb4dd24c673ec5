"""Two gloo processes on the CPU that run one module side by side."""

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def results_of(module, folder, *warnings, **environment):
    """What ``python -m module RANK FOLDER`` wrote to ``FOLDER/RANK.pt`` for both ranks. ``warnings``: filters besides
    "error"."""
    words = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | environment
    filters = [part for word in ("error", *warnings) for part in ("-W", word)]
    command = [sys.executable, *filters, "-m", module]
    processes = [
        subprocess.Popen([*command, str(rank), folder], cwd=ROOT, env=words, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]
