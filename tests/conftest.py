"""What every test runs under: fixed seeds, deterministic algorithms, NaN in every `torch.empty`, and its own process.

The kernels behind `@triton.jit` are either interpreted or compiled, decided at import: tests/interpret needs
TRITON_INTERPRET=1, tests/aot needs it unset, and tests/gpu needs a CUDA device. scripts/test runs the first by itself.
"""

import atexit
import gc
import logging
import os
import random
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import hypothesis
import numpy as np
import pytest
import torch

gc.disable()  # until all is collected, as what is imported stays: 3 s of a start
# What is frozen at exit nanobind reports as leaks. The session's end is too early: pytest collects five times there.
atexit.register(gc.unfreeze)
# pytest listens to loggers that do not propagate, and torch.compile then writes each graph and kernel into this one's
# records: a sixth of the compiled tests' time.
logging.getLogger("torch.__trace").propagate = True

TESTS = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")

# Per folder: its mark, whether its tests can run in this process, and why not.
FOLDERS = {
    "interpret": ("interpret", INTERPRETED, "needs TRITON_INTERPRET=1 (scripts/test runs this folder by itself)"),
    "aot": ("aot", not INTERPRETED, "needs TRITON_INTERPRET unset"),
    "gpu": ("gpu", torch.cuda.is_available(), "needs a CUDA device"),
}

# Rooms and files whose tests carry plans out or show them.
CARRIED_OUT = {"api", "benchmark", "commands", "integrations", "profiling", "runtime"}
CARRIED_OUT |= {"forms", "test_plan_legal.py"}

hypothesis.settings.register_profile("gistkit", deadline=None, derandomize=True, max_examples=40, database=None)
hypothesis.settings.load_profile("gistkit")

if "PYTEST_XDIST_WORKER" in os.environ:  # as many as cores
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes, whose start takes 9 s
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # the compiler knows this processor: 4 s of trials


def pytest_collection_modifyitems(items):
    for item in items:
        folders = item.nodeid.split("/")
        for name, (mark, runs, reason) in FOLDERS.items():
            if name in folders or item.get_closest_marker(mark):
                item.add_marker(getattr(pytest.mark, mark))
                if not runs:
                    item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    """What is imported by now stays to the end. Frozen, no collection of garbage looks at it again: tests that count
    live bytes ask for one a step, of 0.2 to 0.4 s without. Interpreted kernels take no step."""
    if not INTERPRETED:
        import torch._dynamo  # noqa: F401 (else the first step would import it)

        gc.collect()
        gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Nothing is kept in, or taken from, the cache folders of whoever runs the tests. The workers of a run share
    Inductor's, so none compiles what another has; gistkit's records go with it, as a graph that only Inductor's still
    has comes without one."""
    base, own = tmp_path_factory.getbasetemp(), tmp_path_factory.mktemp("cache")
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "inductor"
    (shared / "records").mkdir(parents=True, exist_ok=True)
    (own / "compiled").symlink_to(shared / "records")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GISTKIT_CACHE", str(own))
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared))
        yield


@pytest.fixture(autouse=True)
def short_collections():
    """Where tests have made 140,000 objects that stayed for a while, as compiled graphs do, those alive are frozen too.
    Else every later collection of garbage would look at them again."""
    yield
    if gc.get_count()[2] > 20:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def short_search(request):
    """`optimal` gives up after 10 vain kicks (in place of 200 for a faster step, 100 for a lower peak) where plans are
    made to be carried out or shown: they fit and have all kinds of moves. How good they are the other rooms ask."""
    if CARRIED_OUT.intersection(request.path.relative_to(TESTS).parts):
        from gistkit.planning.policies.optimal import search, solve

        patch = request.getfixturevalue("monkeypatch")
        patch.setattr(search, "PATIENCE", 10)
        patch.setattr(solve, "PATIENCE", 10)


@pytest.fixture(autouse=True)
def reproducible(request):
    """Seeds, deterministic algorithms, and memory from `torch.empty` filled with NaN (integers: their maximum).

    On a CUDA device the algorithms that have no deterministic form (PyTorch's own max-pool backward among them) only
    warn, since they stand on the plain side of comparisons.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=request.node.get_closest_marker("gpu") is not None)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
