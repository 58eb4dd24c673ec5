"""Two processes on the CPU: compressed models under DistributedDataParallel and fully_shard train to plain bits."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.support.nn_cases import same_bits

ROOT = Path(__file__).parents[2]


def test_data_parallel_processes_train_compressed_models_to_the_same_bits(tmp_path):
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-m", "tests.support.distributed_cases"]
    processes = [
        subprocess.Popen([*command, str(rank), tmp_path], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors
    wrong, losses = [], []
    for rank in range(2):
        for case, ways in torch.load(tmp_path / f"{rank}.pt").items():
            plain, _ = ways.pop("plain")
            losses.append((case, plain[0].item()))
            for how, (found, (ratio, notes)) in ways.items():
                recorded = len(notes) == (case[0] == "fsdp")  # under FSDP, which works by hooks, the first step is
                same = len(found) == len(plain) and all(map(same_bits, found, plain))
                wrong += [] if same and ratio > 1.5 and recorded else [(rank, *case, how, ratio, notes)]
    assert wrong == []
    assert len(losses) == 2 * 8 and len(set(losses)) > 8, "the processes have other data"
