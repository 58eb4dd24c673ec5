"""Plan as data."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gistkit.errors import PlanError
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


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda b: b.decode("latin-1")))
def test_any_text_is_a_plan_or_a_plan_error(text):
    with pytest.raises(PlanError, match=r"Plan\.from_json: text must be that of Plan\.to_json, got"):
        Plan.from_json(text)


def edited(**changes):
    raw = json.loads(plan().to_json())
    for path, value in changes.items():
        *way, last = path.split("__")
        place = raw
        for step in way:
            place = place[int(step)] if step.isdigit() else place[step]
        last = int(last) if last.isdigit() else last
        if value is None:
            del place[last]
        else:
            place[last] = value
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (plan().to_json()[:-20], "got text that is no JSON .*give the whole file"),
        ("[]", "got a list without \"format\": 'gistkit.plan'; give the whole file as to_json wrote it, or plan again"),
        ("{}", "got an empty object without"),
        ('{"calls": [], "storages": []}', "got an object with 'calls', 'storages' without"),
        (edited(format="gistkit.hardware"), "got an object with 'version', 'policy'"),
        (edited(version=1), "of version 2, got version 1; plan again with this gistkit"),
        (edited(decisions={}), "got decisions that are an empty object and not a list"),
        (edited(decisions__0=7), r"got decisions\[0\] that is a int and not an object"),
        (edited(decisions__0__colour="red"), r"got decisions\[0\] with the unknown field 'colour'"),
        (edited(decisions__1__codec=None), r"got decisions\[1\] with no 'codec'"),
        (edited(decisions__1__storage="3"), r"got decisions\[1\].storage = '3'"),
        (edited(choices__0__inplace=1), r"got choices\[0\].inplace = 1"),
        (edited(choices__0__slices=True), r"got choices\[0\].slices = True"),
        (edited(peak_bytes="many"), "got plan.peak_bytes = 'many'"),
        (edited(fingerprint=None), "got plan with no 'fingerprint'"),
        (edited(settings=[1]), r"got plan.settings = \[1\]"),
    ],
)
def test_what_is_no_plan_is_refused_by_name(text, message):
    with pytest.raises(PlanError, match=message) as caught:
        Plan.from_json(text)
    assert isinstance(caught.value, ValueError)


def test_whole_numbers_are_seconds_too():
    assert Plan.from_json(edited(step_s=2, gap=0)).step_s == 2
