"""Two processes on the CPU: steps compiled with gistkit under DistributedDataParallel and fully_shard have the bits of
torch.compile, in fewer bytes."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.support.nn_cases import same_bits

ROOT = Path(__file__).parents[2]
# The case of torch.compile whose bits each case must have.
PLAIN = {"around": "around", "inside": "around", "compiled_first": "compiled_first", "sharded_first": "compiled_first"}
# PyTorch's own, where Dynamo breaks a graph, as it does at the wrappers' hooks
IGNORED = "ignore:The .grad attribute of a Tensor:UserWarning"


def test_data_parallel_processes_compiled_with_gistkit_have_the_bits_of_torch_compile(tmp_path):
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    module = "tests.support.compiled_distributed_cases"
    command = [sys.executable, "-W", "error", "-W", IGNORED, "-m", module]
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
        results = torch.load(tmp_path / f"{rank}.pt")
        losses.append({found[0].item() for found, _ in results.values()})
        for (wrapped, how), (found, told) in results.items():
            plain, _ = results[PLAIN[wrapped], "torch"]
            same = len(found) == len(plain) and all(map(same_bits, found, plain))
            if not same or (how != "torch" and not (told[0] == 2 and told[2] < 0.7 * told[1])):
                wrong.append((rank, wrapped, how, same, told))
    assert wrong == []
    assert not losses[0] & losses[1], "the processes have other data"
