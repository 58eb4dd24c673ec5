"""Two processes on the CPU: compiled steps under DDP and fully_shard have torch.compile's bits, in fewer bytes."""

from tests.support.nn_cases import same_bits
from tests.support.two_processes import results_of

# The case of torch.compile whose bits each case must have.
PLAIN = {"around": "around", "inside": "around", "compiled_first": "compiled_first", "sharded_first": "compiled_first"}
GRAPHS = {"around": 2, "inside": 2, "compiled_first": 1, "sharded_first": 1}  # equal blocks, one by one, share theirs
# PyTorch's own, where Dynamo breaks a graph, as it does at the wrappers' hooks
IGNORED = "ignore:The .grad attribute of a Tensor:UserWarning"


def test_data_parallel_processes_compiled_with_gistkit_have_the_bits_of_torch_compile(tmp_path):
    module = "tests.support.compiled_distributed_cases"
    wrong, losses = [], []
    for rank, results in enumerate(results_of(module, tmp_path, IGNORED, TORCHINDUCTOR_COMPILE_THREADS="1")):
        losses.append({found[0].item() for found, _ in results.values()})
        for (wrapped, how), (found, told) in results.items():
            plain, _ = results[PLAIN[wrapped], "torch"]
            same = len(found) == len(plain) and all(map(same_bits, found, plain))
            if not same or (how != "torch" and not (told[0] == GRAPHS[wrapped] and told[2] < 0.7 * told[1])):
                wrong.append((rank, wrapped, how, same, told))
    assert wrong == []
    assert not losses[0] & losses[1], "the processes have other data"
