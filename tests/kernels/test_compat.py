"""Triton's launcher and the one without its half in Python make the same call of C."""

import pytest
import triton

from gistkit.kernels.compat import launcher_of

driver = pytest.importorskip("triton.backends.nvidia.driver")
SETTINGS = {
    "num_ctas": 1, "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0,
    "profile_scratch_align": 1, "launch_cooperative_grid": False, "launch_pdl": True, "gsan_enabled": False,
    "arg_annotations": ["annotations"], "kernel_signature": b"signature",
}  # fmt: skip
ARGUMENTS = (2**40, 2**41, 48, 256, True)


@pytest.mark.parametrize("settings", [{}, {"launch_cooperative_grid": True, "launch_pdl": False}], ids=str)
def test_the_same_call_of_c(monkeypatch, settings):
    _without_a_device(monkeypatch)
    calls, run = [], object.__new__(driver.CudaLauncher)
    run.__dict__ |= {**SETTINGS, **settings, "launch": lambda *args: calls.append(args)}
    ours = launcher_of(run, 77, "metadata")
    run(5, 1, 1, 7, 77, "metadata", None, None, None, *ARGUMENTS)
    ours.launch(5, 1, 1, 7, ours.function, *ours.before, *((ARGUMENTS,) if ours.boxed else ARGUMENTS))
    assert calls[0] == calls[-1]
    known = triton.__version__.startswith(("3.6.", "3.9."))
    assert isinstance(ours.launch, driver.CudaLauncher) is not known


def test_scratch_is_left_to_triton(monkeypatch):
    _without_a_device(monkeypatch)
    run = object.__new__(driver.CudaLauncher)
    for name in ("global_scratch_size", "profile_scratch_size"):
        run.__dict__ |= {**SETTINGS, name: 16}
        assert launcher_of(run, 77, "metadata") == (run, 77, ("metadata", None, None, None), False)


def test_another_release_is_left_to_triton(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    run = object.__new__(driver.CudaLauncher)
    run.__dict__ |= SETTINGS
    assert launcher_of(run, 77, "metadata").launch is run


def _without_a_device(monkeypatch):
    """Triton's launcher asks for the active driver, of which there is none here."""
    monkeypatch.setattr(triton.runtime.driver, "_active", object(), raising=False)
