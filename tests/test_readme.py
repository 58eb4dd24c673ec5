"""The README's example runs as it stands."""

import re
from pathlib import Path


def test_example(capsys):
    text = (Path(__file__).parent.parent / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "rebuild" in shown and "plain PyTorch" in shown
