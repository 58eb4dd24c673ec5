"""Two processes on the CPU: compressed models under DistributedDataParallel and fully_shard train to plain bits."""

from tests.support.nn_cases import same_bits
from tests.support.two_processes import results_of


def test_data_parallel_processes_train_compressed_models_to_the_same_bits(tmp_path):
    wrong, losses = [], []
    for rank, results in enumerate(results_of("tests.support.distributed_cases", tmp_path)):
        for case, ways in results.items():
            plain, _ = ways.pop("plain")
            losses.append((case, plain[0].item()))
            for how, (found, (ratio, notes)) in ways.items():
                recorded = len(notes) == (case[0] == "fsdp")  # under FSDP, which works by hooks, the first step is
                same = len(found) == len(plain) and all(map(same_bits, found, plain))
                wrong += [] if same and ratio > 1.5 and recorded else [(rank, *case, how, ratio, notes)]
    assert wrong == []
    assert len(losses) == 2 * 8 and len(set(losses)) > 8, "the processes have other data"
