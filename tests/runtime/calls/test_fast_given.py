# ruff: noqa: F811
"""The short way under a plan of the caller's: the same bits, the same peaks to the byte and the same report as the long
way, in every form; and that it is taken."""

from collections import Counter

import pytest

from tests.support.fast_cases import image, long_way  # noqa: F401
from tests.support.given_cases import PLANS, agree, made, pair, step

STEPS = 4
pytestmark = pytest.mark.filterwarnings("ignore::gistkit.errors.BudgetWarning")


@pytest.mark.parametrize("name", PLANS)
def test_bits_peaks_and_report_are_those_of_the_long_way(name):
    short, long = pair(name)
    for seed in range(STEPS):
        agree(short, long, image(seed=seed))
    for x in (image(2), image(2), image(), image()):
        agree(short, long, x)


def forms(plan):
    return Counter(d.codec + " host" * (d.place == "host") for d in plan.decisions)


def test_the_plans_have_every_form():
    found = set().union(*(forms(made(name)) for name in PLANS))
    assert found >= {"dense", "dense host", "zvc", "csr", "fp16", "rebuild", "recompute", "mask1", "drop"}
    assert any(made(name).budget_bytes and forms(made(name))["recompute"] for name in PLANS)


@pytest.mark.parametrize(
    "name, left",
    [
        ("open", ["linear", "max_pool2d"]),
        ("gist", ["linear", "max_pool2d", "relu"]),
        ("gist, tight", ["linear", "max_pool2d", "relu"]),
    ],
)
def test_the_short_way_is_taken(name, left, long_way):
    """All but a linear layer, a pool and the ReLU whose mask that carries."""
    model, _ = pair(name)
    for seed in range(STEPS):
        long_way.clear()
        step(model, image(seed=seed))
    assert sorted(long_way) == left


def test_calls_of_no_segment_take_the_short_way(long_way):
    model, _ = pair("75 %")
    for seed in range(STEPS):
        long_way.clear()
        step(model, image(seed=seed))
    (program,) = model.forward.engine._programs.values()
    watched = [c.op for c in program.graph.calls if c.covered >= 0 and c.index in program.again.watched]
    assert 0 < len(watched) < 6
    assert set(long_way) <= {*watched, "linear", "max_pool2d", "relu"} and len(long_way) <= len(watched) + 3
