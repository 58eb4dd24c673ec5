"""Budgets as callers write them: every form, every unit, and what is said of nonsense."""

import pytest

from gistkit.planning.cost.budget import check_budget, parse_budget, parse_bytes

GIB = 2**30
PLAIN = 1_000_003
FORMS = r'bytes as an int, "12GiB", "800MB"'


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (12 * GIB, 12 * GIB),
        ("12GiB", 12 * GIB),
        (" 12gib ", 12 * GIB),
        ("800MB", 800_000_000),
        ("1.5 kB", 1500),
        (".5KiB", 512),
        ("4096", 4096),
        ("0.1GB", 100_000_000),  # exact: 0.1 is no binary fraction
        ("0.3KiB", 307),  # 307.2, rounded down
    ],
)
def test_forms(text, nbytes):
    assert parse_budget(text, PLAIN) == nbytes == parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("60%", 600_001), ("100 %", PLAIN), ("33.3%", 333_000), ("250%", 2_500_007)]
)
def test_shares_of_the_plain_peak_are_rounded_down(text, nbytes):
    assert parse_budget(text, PLAIN) == nbytes


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (
            "a lot",
            rf'budget must be {FORMS} or "60%" of the plain peak, got .a lot.; write a number and a unit, as "1.5GiB"',
        ),
        ("-1GiB", r"got '-1GiB'; write a number"),
        ("12 parsecs", r"got '12 parsecs': the unit 'parsecs' is none of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB or %"),
        ("0", r"budget must be more than 0, got '0'; write .*, or None for no budget"),
        ("5000%", r"budget must be at most 1000%, got '5000%'; 100% is what plain PyTorch needs"),
        (-5, r"budget must be .*, from 0 to 2\*\*60 bytes, got -5; check the number"),
        ("9999999TiB", r"from 0 to 2\*\*60 bytes, got '9999999TiB'; check the unit"),
    ],
)
def test_nonsense(budget, text):
    with pytest.raises(ValueError, match=text):
        parse_budget(budget, PLAIN)
    with pytest.raises(ValueError, match=text):
        check_budget(budget)


@pytest.mark.parametrize("budget", [1.5, True, [1], b"12GiB"])
def test_other_types(budget):
    with pytest.raises(TypeError, match=rf"budget must be .*, got {type(budget).__name__} .*; write one of these"):
        parse_budget(budget, PLAIN)


def test_a_reserve_is_no_share():
    with pytest.raises(ValueError, match=r"reserved_bytes must be .*, got '10%': a share of what\? Write bytes"):
        parse_bytes("10%")
