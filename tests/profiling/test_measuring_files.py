"""Files of measured times and the command line that writes and reads them; what is wrong with them, by the text."""

import json

import pytest
import torch

import gistkit
from gistkit import StepTimes, cli
from tests.support.measuring_cases import SMALL, saved, step


@pytest.fixture(scope="module")
def times():
    return gistkit.measure(*step())


def changed(text, **values):
    return json.dumps({**json.loads(text), **values})


NONSENSE = {
    "not json": (lambda t: "{", r"expected JSON, got other text"),
    "version": (lambda t: changed(t, version=7), r"version: expected 2, got 7"),
    "device": (lambda t: changed(t, device=""), r"device must be a text that is not empty, got ''"),
    "rows": (lambda t: changed(t, rows=5), r"rows must be at least 0 and at most the batch's 4, got 5"),
    "step": (lambda t: changed(t, step_s=0), r"step_s must be seconds above 0, got 0"),
    "seconds": (lambda t: changed(t, seconds={"0": -1.0}), r"seconds must be seconds above 0 .*, got \{0: -1.0\}"),
    "key": (lambda t: changed(t, seconds={"conv": 1.0}), r"a key of seconds: expected `int`, got `str`"),
    "bytes": (
        lambda t: changed(t, workspace_bytes={"0": -1}),
        r"workspace_bytes must be bytes of at least 0 by number of a task, got \{0: -1\}",
    ),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_files(times, tmp_path, case):
    make, text = NONSENSE[case]
    file = saved(tmp_path, times)
    file.write_text(make(times.to_json()))
    with pytest.raises(ValueError, match=rf"^plan: the file of times {file}: {text}.*; measure anew: `gistkit profile"):
        gistkit.plan(*step(), measure=file)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"^plan: the file of times nowhere.json cannot be read .*; measure anew"):
        gistkit.plan(*step(), measure="nowhere.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"^profile: the file of times .*binary cannot be read"):
        gistkit.profile(*step(), measure=tmp_path / "binary")
    with pytest.raises(TypeError) as raised:
        gistkit.plan(*step(), measure=3)
    assert str(raised.value) == (
        "plan: measure must be True, False, the path of a file of times or what gistkit.measure returned, got int; "
        "pass one of these"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures on the GPU there")
def test_commands(tmp_path, capsys):
    times, numbers = tmp_path / "new" / "times.json", tmp_path / "numbers.json"
    arguments = [*SMALL, "--measure", "--times", str(times), "--json", str(numbers)]
    assert cli.main(["profile", *arguments]) == 0
    out = capsys.readouterr().out
    assert "measured on cpu: a step took" in " ".join(out.split())
    found = StepTimes.from_json(times.read_text())
    raw = json.loads(numbers.read_text())
    assert raw["times"]["seconds"] == {str(t): s for t, s in found.seconds.items()}
    assert raw["layers"][0]["forward_s"] == pytest.approx(found.seconds[0])
    words = ["--times", str(times), "--policy", "gist", "--json", str(numbers)]
    assert cli.main(["plan", *SMALL, *words]) == 0
    assert "seconds measured on cpu: a step took" in " ".join(capsys.readouterr().out.split())
    raw = json.loads(numbers.read_text())
    assert raw["times"]["fingerprint"] == found.fingerprint == raw["plan"]["prediction"]["measured"]["fingerprint"]
    assert raw["policies"][0]["step_s"] == pytest.approx(found.total_s, rel=1e-9)
    assert cli.main(["plan", *SMALL, "--measure", "--policy", "gist", "--json", str(numbers)]) == 0
    assert json.loads(numbers.read_text())["times"]["device"] == "cpu"
