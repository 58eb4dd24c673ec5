"""Two processes on the CPU: compressed models under DistributedDataParallel and fully_shard train to plain bits."""

import os
import subprocess
import sys

import torch

from tests.support import distributed_cases
from tests.support.nn_cases import same_bits
from tests.support.two_processes import ROOT


def test_data_parallel_processes_train_compressed_models_to_the_same_bits(tmp_path, monkeypatch):
    """The first process is this one, as a start of PyTorch takes 5 s."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-W", "error", "-m", "tests.support.distributed_cases", "1", tmp_path]
    words = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=words, stderr=subprocess.PIPE, text=True) as other:
        try:
            distributed_cases.main(0, tmp_path)
            error = other.communicate(timeout=60)[1]
        finally:
            other.kill()
    assert other.returncode == 0, error
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
