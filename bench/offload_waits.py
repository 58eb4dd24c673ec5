"""Which test notices when the offloader leaves one of its waits out: ``python -m bench.offload_waits``.

Every statement ``….wait(…)`` or ``….follow(…)`` of gistkit/runtime/offload/offloader.py is taken out of a copy of the
project, one at a time, and so is what keeps a source alive for its copy; tests/runtime/offload then have to fail.
Prints a line for each, and ends with status 1 where all tests passed without it. Takes some 15 s each.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = Path("gistkit/runtime/offload/offloader.py")
TESTS = "tests/runtime/offload"
WAITS = ("wait", "follow")
REPLACED = {"_Outgoing(record, record.tensors, ": "_Outgoing(record, (), "}
"""What is not a statement of its own, and what it becomes."""

UNSHRUNK = """
hypothesis.settings.register_profile("unshrunk", phases=(hypothesis.Phase.generate,), derandomize=True, database=None)
hypothesis.settings.load_profile("unshrunk")
"""
"""The first failure will do; looking for a smaller one takes most of the time."""


def mutants(source: str) -> dict[str, str]:
    """What is left out, and the source without it."""
    found: dict[str, str] = {}
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _name(node.value.func) in WAITS:
            first, last = node.lineno - 1, node.end_lineno or node.lineno
            without = [*lines[:first], " " * node.col_offset + "pass\n", *lines[last:]]
            found[f"line {node.lineno}: {ast.unparse(node)}"] = "".join(without)
    for text, other in REPLACED.items():
        if source.count(text) != 1:
            raise SystemExit(f"{FILE} must have {text!r} once, has it {source.count(text)} times; correct REPLACED")
        found[f"{text}... -> {other}..."] = source.replace(text, other)
    return found


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else ""


def noticed_by(project: Path) -> str:
    """The test that fails there; empty if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", TESTS]
    ran = subprocess.run(command, cwd=project, env={**os.environ, "PYTHONPATH": str(project)}, capture_output=True)
    failed = re.search(r"^FAILED (\S+)", ran.stdout.decode(), re.MULTILINE)
    if ran.returncode not in (0, 1) or bool(ran.returncode) != bool(failed):
        raise SystemExit(ran.stdout.decode())
    return failed[1] if failed else ""


def main() -> None:
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        for part in ("gistkit", "tests"):
            shutil.copytree(ROOT / part, project / part)
        shutil.copy(ROOT / "pyproject.toml", project)
        with (project / "tests/conftest.py").open("a") as file:
            file.write(UNSHRUNK)
        for what, source in mutants((ROOT / FILE).read_text()).items():
            (project / FILE).write_text(source)
            test = noticed_by(project)
            unnoticed += not test
            print(f"{what}: {test or 'NOT NOTICED'}", flush=True)
    raise SystemExit(unnoticed > 0)


if __name__ == "__main__":
    main()
