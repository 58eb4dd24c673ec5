"""The multiple-choice knapsack of lossy="auto", against brute force."""

from itertools import product
from math import hypot

from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.planning import Choice, least_bytes_within
from gistkit.planning.knapsack import UNITS

CHOICE = st.builds(Choice, st.one_of(st.floats(0, 2), st.just(float("inf"))), st.integers(-2000, 0))
GROUPS = st.lists(st.lists(CHOICE, max_size=3).map(lambda found: [Choice(0.0, 0), *found]), max_size=5)


def sums(groups, taken):
    picked = [group[i] for group, i in zip(groups, taken, strict=True)]
    return hypot(*(c.error for c in picked)), sum(c.nbytes for c in picked)


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.floats(0.01, 3))
def test_it_is_the_best_of_all_but_for_the_units_rounded_up(groups, bound):
    taken = least_bytes_within(groups, bound)
    error, nbytes = sums(groups, taken)
    assert error <= bound * (1 + 1e-12)
    every = [sums(groups, each) for each in product(*(range(len(g)) for g in groups))]
    # every square is rounded up by less than a unit
    sure = bound * (1 - (len(groups) + 1e-6) / UNITS) ** 0.5
    assert min(n for e, n in every if e <= bound) <= nbytes <= min(n for e, n in every if e <= sure)
    assert least_bytes_within(groups, bound) == taken


def test_ties_go_to_the_least_error_and_then_to_the_first():
    exact = Choice(0.0, 0)
    assert least_bytes_within([[exact, Choice(0.5, -8), Choice(0.1, -8), Choice(0.1, -8)]], 1.0) == [2]
    assert least_bytes_within([[exact, Choice(0.0, 0)]], 1.0) == [0]
    assert least_bytes_within([], 1.0) == []
