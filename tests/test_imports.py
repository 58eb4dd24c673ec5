"""What importing gistkit costs, what it shows, and that every module has a place in the layers."""

import ast
import importlib.util
import inspect
import pkgutil
import subprocess
import sys

import pytest

import gistkit

LAZY = ("triton", "scipy", "matplotlib", "PIL", "sklearn")
PUBLIC = ("compress", "restore", "report", "plan", "profile", "step", "functional", "nn", "zoo")
MODULES = sorted(m.name for m in pkgutil.walk_packages(gistkit.__path__, "gistkit."))


def test_import_is_light_and_little_must_be_installed():
    """On a machine with a GPU there may be torch, triton, numpy and rich alone, and no console script."""
    code = (
        f"import sys, runpy, gistkit; print([m for m in {LAZY!r} if m in sys.modules], flush=True)\n"
        "for name in ('scipy', 'matplotlib', 'PIL', 'sklearn', 'hypothesis'): sys.modules[name] = None\n"
        "sys.argv = 'gistkit bench --device cpu --quick --sizes-mib 0.05 --codec mask1'.split()\n"
        "runpy.run_module('gistkit', run_name='__main__')\n"
    )
    # -W error also proves that importing warns of nothing.
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("[]\n"), done.stderr
    assert "3 rows, 0 failed" in done.stdout


def test_public_names():
    assert [n for n in PUBLIC if not (getattr(gistkit, n).__doc__ or "").strip()] == []
    assert set(PUBLIC) <= set(gistkit.__all__)
    assert [n for n in gistkit.__all__ if not hasattr(gistkit, n)] == []


def _undocumented(tree: ast.Module) -> list[str]:
    """Public functions and classes at module level without a docstring; operators' fakes are documented by a table."""
    found = []
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        decorators = {ast.unparse(d).split("(")[0].split(".")[-1] for d in node.decorator_list}
        if not decorators & {"operator", "jit", "overload"} and ast.get_docstring(node) is None:
            found.append(node.name)
    return found


def test_public_functions_have_docstrings():
    """One test for all modules: three hundred took a third of a second of every worker's start."""
    found = {}
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        with open(spec.origin, encoding="utf-8") as file:
            found[name] = _undocumented(ast.parse(file.read()))
    assert {name: missing for name, missing in found.items() if missing} == {}


def test_every_module_is_in_a_layer():
    tomllib = pytest.importorskip("tomllib")
    with open("pyproject.toml", "rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["type"] == "layers")
    placed = {part.strip(" ()") for layer in layers for part in layer.replace(":", "|").split("|")}
    packages = {name.rpartition(".")[0] for name in placed}
    homeless = [m for m in MODULES if m not in packages and not any(m == p or m.startswith(p + ".") for p in placed)]
    assert homeless == []
    assert [p for p in placed if p not in MODULES] == []


def test_compress_has_the_agreed_signature():
    parameters = inspect.signature(gistkit.compress).parameters
    assert list(parameters)[:2] == ["model", "plan"]
    assert {k for k, p in parameters.items() if p.kind is p.KEYWORD_ONLY} >= {"lossy", "fidelity"}
    assert parameters["fidelity"].default == "bitwise" and parameters["lossy"].default is None
