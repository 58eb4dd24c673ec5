"""Programs are solved in a process of their own, whatever becomes of it."""

import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, LinearConstraint, milp

import gistkit
from gistkit.planning.policies.optimal import solver as optimal_solver
from gistkit.planning.policies.optimal.solver import INFEASIBLE, OTHER, Found, prepare, solve

VALUES, WEIGHTS = np.array([6.0, 5.0, 8.0, 9.0, 6.0, 7.0]), np.array([2.0, 3.0, 6.0, 7.0, 5.0, 9.0])
WRAPPED = """
import os, runpy, signal, sys, time
import scipy.optimize
solved = scipy.optimize.milp
def milp(options, **words):
    {body}
    return solved(options=options, **words)
scipy.optimize.milp = milp
runpy.run_path({child!r}, run_name="__main__")
"""


def knapsack(most: float, least: float = 0.0) -> dict:
    rows = LinearConstraint(WEIGHTS[None, :], least, most)
    return {"c": -VALUES, "integrality": np.ones(6), "bounds": Bounds(0, 1), "constraints": rows}


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Has programs solved by a process whose milp begins with these lines."""
    idle: list = []
    monkeypatch.setattr(optimal_solver, "_idle", idle)

    def begin(body: str) -> None:
        path = tmp_path / "child.py"
        path.write_text(WRAPPED.format(body=body, child=str(optimal_solver._CHILD)))
        monkeypatch.setattr(optimal_solver, "_CHILD", path)

    yield begin
    while idle:
        idle.pop().close()


def is_solved(found: Found) -> bool:
    """Of :func:`knapsack` with a capacity of 15: the best of all choices, without milp, whose threads no fork has."""
    choices = (np.array(choice) for choice in itertools.product((0, 1), repeat=6))
    best = max(float(VALUES @ choice) for choice in choices if WEIGHTS @ choice <= 15)
    return found.status == 0 and found.fun == pytest.approx(-best)


def test_it_is_scipys_milp():
    prepare()
    found, own = solve(knapsack(15.0), 10), milp(**knapsack(15.0))
    assert found.status == own.status == 0 and found.x is not None
    np.testing.assert_array_equal(found.x, own.x)
    assert (found.fun, found.bound) == (own.fun, own.mip_dual_bound)
    assert solve(knapsack(15.0, least=40.0), 10).status == INFEASIBLE


def test_one_process_serves_all_programs(child, monkeypatch):
    started = []
    begin = optimal_solver._Child
    monkeypatch.setattr(optimal_solver, "_Child", lambda: started.append(1) or begin())
    prepare()
    assert all(is_solved(solve(knapsack(15.0), 10)) for _ in range(3))
    assert len(started) == 1


def test_threads_have_a_process_each(child):
    child("time.sleep(0.2)")
    found = []
    threads = [threading.Thread(target=lambda: found.append(solve(knapsack(15.0), 30))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and all(map(is_solved, found))


@pytest.mark.parametrize("signal", ["SIGSEGV", "SIGABRT", "SIGKILL"])
def test_where_presolving_crashes_it_is_left_out(child, signal):
    child(f"if options['presolve']: os.kill(os.getpid(), signal.{signal})")
    assert is_solved(solve(knapsack(15.0), 30))


def test_what_presolving_calls_infeasible_is_asked_again(child):
    child("words['bounds'].ub = -1.0 if options['presolve'] else 1.0")
    assert is_solved(solve(knapsack(15.0), 30))


def test_of_a_program_that_crashes_nothing_is_known(child):
    child("os.abort()")
    assert solve(knapsack(15.0), 30) == Found(OTHER)


def test_a_process_that_takes_too_long_is_ended(child, monkeypatch):
    child("time.sleep(60)")
    monkeypatch.setattr(optimal_solver, "PATIENCE_S", 0.3)
    assert solve(knapsack(15.0), 0.1) == Found(OTHER)
    assert not optimal_solver._idle


def test_nothing_that_the_solver_prints_is_seen(child, capfd):
    child("os.write(1, b'a line of HiGHS'); os.write(2, b'another')")
    assert is_solved(solve(knapsack(15.0), 30))
    assert capfd.readouterr() == ("", "")


def test_what_is_no_python_solves_by_itself(child, monkeypatch):
    child("os.abort()")
    monkeypatch.setattr(sys, "executable", "/opt/modeller/bin/modeller")
    assert is_solved(solve(knapsack(15.0), 10))


def test_a_plan_comes_where_every_program_crashes(child):
    child("os.abort()")
    with torch.device("meta"):
        model, batch = gistkit.zoo.resnet18(10, 32), torch.empty(32, 3, 32, 32)
    plan = gistkit.plan(model, batch, budget="70%", hardware="titanx")
    assert plan.budget_bytes is not None and plan.peak_bytes <= plan.budget_bytes
    assert plan.gap is not None and 0 <= plan.gap < 1


FORKED = """
import os, sys
sys.path.insert(0, {root!r})
from tests.planning.policies.test_optimal_solver import is_solved, knapsack, solve
assert is_solved(solve(knapsack(15.0), 30))
pid = os.fork()
if pid == 0:
    sys.exit(0 if is_solved(solve(knapsack(15.0), 30)) else 1)
assert os.waitpid(pid, 0)[1] == 0
assert is_solved(solve(knapsack(15.0), 30))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a fork is POSIX's")
def test_a_fork_leaves_its_parents_process_alone():
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error::ResourceWarning",
            "-W",
            "ignore::DeprecationWarning",
            "-c",
            FORKED.format(root=root),
        ],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
