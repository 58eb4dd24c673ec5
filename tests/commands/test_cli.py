"""The command as a user meets it: exit status, the files it writes, one line for wrong input."""

import json
from importlib.metadata import entry_points

from PIL import Image

from gistkit import cli
from gistkit.training import loop
from tests.training.test_train import nudge

TINY = ["train", "tests.training.test_train:tiny", "--steps", "3", "--batch", "4"]


def test_the_main_job(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    picture, numbers = tmp_path / "new" / "memory.png", tmp_path / "new" / "result.json"
    assert cli.main([*TINY, "--plot", str(picture), "--json", str(numbers)]) == 0
    shown = capsys.readouterr()
    for text in ("plain", "lossless", "fp8", "kept MiB", "peak live MiB", "ms/step", "last loss", "accuracy"):
        assert text in shown.out
    assert "…" not in shown.out
    assert "the lossless loss equals the plain one bit for bit in all 3 steps" in shown.out
    raw = json.loads(numbers.read_text())
    assert raw["first_difference"] is None and len(raw["runs"]) == 3
    with Image.open(picture) as image:
        assert image.size == (1350, 840)
        # White ground, grey axes and the colours of three lines.
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
        assert {(0x3B, 0x42, 0x52), (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= colours


def test_a_differing_bit_fails(capsys, monkeypatch):
    monkeypatch.setattr(loop, "compress", nudge)
    assert cli.main([*TINY, "--lossy", "none"]) == 1
    shown = capsys.readouterr()
    assert "the lossless loss differs from the plain one" in shown.err and "in step 3;" in shown.err
    assert "equals" not in shown.out


def test_names_of_files_do_not_reach_the_terminal_raw(tmp_path, capsys):
    odd = tmp_path.with_name("\x1b[31m\udcff[red]")
    for label in ("ape", "bee"):
        (odd / label).mkdir(parents=True)
        for i in range(6):
            Image.new("RGB", (40, 50), (40 * i, 80, 120)).save(odd / label / f"{i}.png")
    assert cli.main([*TINY, "--lossy", "none", "--data", str(odd)]) == 0
    (odd / "bee" / "3.png").write_bytes(b"broken")
    assert cli.main([*TINY, "--data", str(odd), "--batch", "12"]) == 2
    shown = capsys.readouterr()
    assert all(r"/\x1b[31m\udcff[red]" in text and "\x1b" not in text for text in (shown.out, shown.err))


def test_the_console_script_is_this_function():
    (script,) = entry_points(group="console_scripts", name="gistkit")
    assert script.load() is cli.main
