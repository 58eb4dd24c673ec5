"""Amounts of memory as callers write them: bytes, ``"12GiB"``, ``"800 MB"``, and for budgets ``"60%"``. Pure data.

KiB, MiB, GiB, TiB are powers of 1024, kB, MB, GB, TB of 1000; case does not matter, decimal numbers are fine, a bare
number in a text counts bytes. A share is of the peak of plain PyTorch. What does not come out as whole bytes is rounded
down, so a budget is never exceeded by rounding.
"""

from __future__ import annotations

import re
from decimal import Decimal

from gistkit.errors import quoted

UNITS = {"b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for ending, base in (("b", 1000), ("ib", 1024))
}
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(%|[A-Za-z]*)\s*")
_LARGEST = 2**60
FORMS = 'bytes as an int, "12GiB", "800MB"'


def parse_bytes(amount: int | str) -> int:
    """The bytes of an int or of a text with a unit, 0 or more. Raises TypeError for other types, ValueError for what is
    no amount: argument, demand, value, remedy."""
    return _bytes(amount, "reserved_bytes", FORMS, None)


def parse_budget(budget: int | str | None, plain_peak_bytes: int) -> int | None:
    """The bytes of a budget; ``"60%"`` is that share of ``plain_peak_bytes``. None stays None: no budget. Raises
    TypeError for other types, ValueError for what is no budget (0 and less, nonsense)."""
    if budget is None:
        return None
    forms = f'{FORMS} or "60%" of the plain peak'
    nbytes = _bytes(budget, "budget", forms, plain_peak_bytes)
    if nbytes < 1:
        raise ValueError(f"budget must be more than 0, got {quoted(budget)}; write {forms}, or None for no budget")
    return nbytes


def check_budget(budget: int | str | None) -> None:
    """Raise what :func:`parse_budget` raises, before a plain peak is known."""
    parse_budget(budget, _LARGEST)


def _bytes(amount: int | str, argument: str, forms: str, whole_bytes: int | None) -> int:
    """Bytes; a percentage is one of ``whole_bytes``, None: of nothing."""
    got = quoted(amount)
    if isinstance(amount, bool) or not isinstance(amount, int | str):
        raise TypeError(f"{argument} must be {forms}, got {type(amount).__name__} {got}; write one of these")
    if isinstance(amount, int):
        number, unit, where = Decimal(amount), "", "number"
    else:
        found = _AMOUNT.fullmatch(amount)
        if found is None:
            raise ValueError(f'{argument} must be {forms}, got {got}; write a number and a unit, as "1.5GiB"')
        number, unit, where = Decimal(found[1]), found[2], "unit"
    if unit == "%":
        if number > 1000:
            raise ValueError(f"{argument} must be at most 1000%, got {got}; 100% is what plain PyTorch needs")
        if whole_bytes is None:
            raise ValueError(f'{argument} must be {forms}, got {got}: a share of what? Write bytes, as "1.5GiB"')
        return int(whole_bytes * number / 100)
    factor = UNITS.get(unit.lower() or "b")
    if factor is None:
        known = "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB or %"
        raise ValueError(f"{argument} must be {forms}, got {got}: the unit {quoted(unit)} is none of {known}")
    nbytes = int(number * factor)
    if not 0 <= nbytes <= _LARGEST:
        raise ValueError(f"{argument} must be {forms}, from 0 to 2**60 bytes, got {got}; check the {where}")
    return nbytes
