"""The README's examples run as they stand."""

import re
from pathlib import Path


def run(number: int) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 2
    exec(compile(examples[number], "README.md", "exec"), {})


def test_the_first_screen(capsys):
    run(0)
    shown = capsys.readouterr().out
    assert "rebuild" in shown and "plain PyTorch" in shown


def test_a_budget(capsys):
    run(1)
    shown = capsys.readouterr().out
    assert "predicted peak" in shown and "kept: the budget allows it" in shown
