"""Ahead-of-time tests need Triton's compiler and a process in which the interpreter is off."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("TRITON_INTERPRET is set: run tests/aot in a process of its own", allow_module_level=True)

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")


def pytest_collection_modifyitems(items):
    for item in items:
        if "/aot/" in item.nodeid or item.nodeid.startswith("aot/"):
            item.add_marker(pytest.mark.aot)
