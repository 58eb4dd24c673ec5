"""Two gloo processes on the CPU that run one module side by side."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
PROGRAM = """
import multiprocessing, sys
from importlib import import_module
module, folder = import_module(sys.argv[1]), sys.argv[2]
getattr(module, "warm_up", lambda: None)()
context = multiprocessing.get_context("fork")
ranks = [context.Process(target=module.main, args=(rank, folder)) for rank in range(2)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
sys.exit(str([rank.exitcode for rank in ranks]) if any(rank.exitcode for rank in ranks) else 0)
"""


def results_of(module, folder, *warnings, **environment):
    """What ``module.main(rank, folder)`` wrote to ``FOLDER/RANK.pt`` for both ranks, in forks of one process that
    imported the module and ran its ``warm_up``, if any, without a backward. ``warnings``: filters besides "error"."""
    words = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | environment
    filters = [part for word in ("error", *warnings) for part in ("-W", word)]
    command = [sys.executable, *filters, "-c", PROGRAM, module, folder]
    with subprocess.Popen(
        command, cwd=ROOT, env=words, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as both:
        try:
            errors = both.communicate(timeout=300)[1]
        except BaseException:
            os.killpg(both.pid, signal.SIGKILL)  # and the two that it forked
            raise
    assert both.returncode == 0, errors
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]
