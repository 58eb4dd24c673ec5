"""Plan as data."""

import json

import pytest

from gistkit.plan.plan import CallChoice, Decision, Plan


def plan():
    recipe = ("relu", ("add", ("bn", 12), ("stash", 3)))
    return Plan(
        policy="gist",
        fingerprint="0123456789abcdef",
        decisions=(
            Decision(3, "zvc+fp8", reason="why"),
            Decision(5, "rebuild", place="nowhere", mask=True, sources=(2, 3), recipe=recipe),
        ),
        choices=(CallChoice(1, "relu", inplace=True, passes=True), CallChoice(2, "max_pool2d", zero_code=True)),
        plain_bytes=100,
        kept_bytes=10,
        settings={"lossy": "fp8"},
    )


def test_json_round_trip():
    assert Plan.from_json(plan().to_json()) == plan()
    raw = json.loads(plan().to_json())
    assert raw["decisions"][1]["recipe"] == ["relu", ["add", ["bn", 12], ["stash", 3]]]


def test_decisions_of_older_plans_without_recipes_are_refused_by_name():
    raw = json.loads(plan().to_json())
    raw["decisions"][0]["colour"] = "red"
    with pytest.raises(TypeError, match="colour"):
        Plan.from_json(json.dumps(raw))
