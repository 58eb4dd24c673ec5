"""docs/checklist.md: every ticked row says what shows it, and that exists."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROWS = (ROOT / "docs" / "checklist.md").read_text(encoding="utf-8").splitlines()
TICKED = [row for row in ROWS if row.startswith("- [x] ")]


@cache
def named_in(path):
    return set(re.findall(r"^(?:def|    def) (test_\w+)", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE))


def missing(row):
    """The files and tests that a row names and that are not there; ``::name`` is of the file named before it."""
    found, path = [], ""
    for named in re.findall(r"`((?:(?:tests|bench|docs)/[\w./-]+|)(?:::\w+)?)`", row):
        file, _, test = named.partition("::")
        path = file or path
        if not (ROOT / path).is_file():
            found.append(path)
        elif test and test not in named_in(path):
            found.append(f"{path}::{test}")
    return found


def test_what_the_ticks_name_is_there():
    for row in TICKED:
        shows = row.rpartition(" — **")[2]
        named = re.search(r"`(tests|bench/results)/|`docs/papers.md`|`gistkit train`", shows)
        assert named, f"a tick names what shows it: {row}"
        assert missing(shows) == [], row


def test_what_is_not_there_is_seen():
    assert missing("`tests/test_checklist.py::test_nothing`, `::test_what_is_not_there_is_seen`, `bench/none.py`") == [
        "tests/test_checklist.py::test_nothing",
        "bench/none.py",
    ]
    assert len(TICKED) > 100
