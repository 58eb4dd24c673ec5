"""Plan as data."""

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gistkit.errors import PlanError
from gistkit.ir.contract import Contract
from gistkit.ir.plan import CallChoice, Decision, Plan


def plan():
    recipe = ("relu", ("add", ("bn", 12), ("stash", 3)))
    return Plan(
        policy="gist",
        fingerprint="0123456789abcdef",
        decisions=(
            Decision(3, "zvc+fp8", reason="why"),
            Decision(5, "rebuild", place="nowhere", mask=True, sources=(2, 3), recipe=recipe),
        ),
        choices=(CallChoice(1, "relu", mask_in_pool=True), CallChoice(2, "max_pool2d", mask_in_pool=True)),
        plain_bytes=100,
        kept_bytes=10,
        contract=Contract(8, densities={3: 0.5}, lossy="fp8"),
        details={"segments": 3},
    )


def test_json_round_trip():
    made = plan()
    assert made.decisions[0].form.sparse and not made.decisions[0].stays, "what a decision derives is not in the JSON"
    assert Plan.from_json(made.to_json()) == made == plan()
    raw = json.loads(plan().to_json())
    assert raw["decisions"][1]["recipe"] == ["relu", ["add", ["bn", 12], ["stash", 3]]]


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda b: b.decode("latin-1")))
def test_any_text_is_a_plan_or_a_plan_error(text):
    with pytest.raises(PlanError, match=r"Plan\.from_json: text must be that of Plan\.to_json; "):
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
        (plan().to_json()[:-20], r"expected JSON, got other text \(.*\); give the whole file as to_json"),
        ("[]", "format: expected 'gistkit.plan', got None"),
        (edited(format="gistkit.hardware"), "format: expected 'gistkit.plan', got 'gistkit.hardware'"),
        (edited(version=5), "version: expected 7, got 5; give the whole file as to_json wrote it, or plan again"),
        ("[" * 100_000, "expected JSON"),
        (edited(step_s=float("nan")), "expected JSON"),
        (edited(decisions__0__colour="red"), r"decisions\[0\].colour: expected no such field"),
        (edited(decisions__1__codec=None), r"decisions\[1\]: object missing required field `codec`"),
        (edited(decisions__1__storage="3"), r"decisions\[1\].storage: expected `int`, got `str`"),
        (edited(choices__0__covered=True), r"choices\[0\].covered: expected `int`, got `bool`"),
        (edited(fingerprint=None), "; object missing required field `fingerprint`"),
    ],
)
def test_what_is_no_plan_is_refused_by_name(text, message):
    with pytest.raises(PlanError, match=message) as caught:
        Plan.from_json(text)
    assert isinstance(caught.value, ValueError)


CHANGES = {
    "fingerprint": "f" * 16, "budget_bytes": 7, "policy": "plain", "plain_bytes": 99, "kept_bytes": 11,
    "contract__lossy": "fp16", "contract__reserved_bytes": -(10**9), "contract__training": False,
    "prediction__plain_step_s": 9.0, "details__segments": 4, "peak_bytes": 1, "step_s": 1e-9, "lower_bound_bytes": 3,
    "gap": 0.0, "sub_batches": 2, "fidelity": "lossy", "hardware": "h200", "decisions__0__reason": "another",
    "choices__0__mask_in_pool": False, "modules": ["a"],
}  # fmt: skip


@pytest.mark.parametrize("place", CHANGES)
def test_a_file_that_was_altered_anywhere_is_refused(place):
    with pytest.raises(PlanError, match=r"edited after it was planned: its digest '[0-9a-f]{16}' is not that of the"):
        Plan.from_json(edited(**{place: CHANGES[place]}))
    assert Plan.from_json(edited(**{place: CHANGES[place]}, digest=None)) != plan()


def test_every_field_can_be_altered_above():
    assert {f.name for f in fields(Plan)} - {place.split("__")[0] for place in CHANGES} == set()


def test_a_file_is_the_same_in_another_spelling():
    made = replace(plan(), step_s=2.0, gap=0.0)
    again = Plan.from_json(json.dumps({**json.loads(made.to_json()), "step_s": 2, "gap": 0}, sort_keys=True, indent=1))
    assert again == made and Plan.from_json(again.to_json()) == again
