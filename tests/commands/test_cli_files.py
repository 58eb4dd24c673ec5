"""The files that commands write: whole or not at all."""

import os
import subprocess
import sys

import pytest

from gistkit import cli
from gistkit.commands import images
from gistkit.commands.wrong import claim, write


def test_a_command_that_is_cut_off_leaves_no_file(tmp_path, monkeypatch):
    def cut_off(*_):
        raise KeyboardInterrupt

    file = tmp_path / "new" / "times.json"
    monkeypatch.setattr(images, "times_for", cut_off)
    words = ["profile", "resnet18", "--batch", "1", "--image-size", "32", "--hardware", "cpu", "--measure"]
    with pytest.raises(KeyboardInterrupt):
        cli.main([*words, "--times", str(file)])
    assert file.parent.is_dir() and not list(file.parent.iterdir())


def test_what_is_there_stays_until_it_is_written_whole(tmp_path, monkeypatch):
    file = tmp_path / "found.json"
    file.write_text("old")
    claim([file, None])
    assert file.read_text() == "old"
    link = tmp_path / "link.json"
    link.symlink_to(file)
    write(link, "new")
    assert file.read_text() == "new" and link.is_symlink()

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(type(file), "replace", full)
    with pytest.raises(OSError, match="no space left"):
        write(file, "newer")
    assert file.read_text() == "new" and {p.name for p in tmp_path.iterdir()} == {"found.json", "link.json"}
    write(tmp_path / os.devnull, "nothing")
    assert not os.path.isfile(os.devnull)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="must not be a folder"):
        claim([tmp_path])


@pytest.mark.parametrize("command", ["plan", "profile"])
def test_a_reader_that_closes_the_tables_early_loses_no_file(command, tmp_path):
    file = tmp_path / "found.json"
    words = [command, "resnet18", "--batch", "1", "--image-size", "32", "--hardware", "cpu", "--json", str(file)]
    run = subprocess.Popen([sys.executable, "-m", "gistkit", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert run.stdout is not None
    run.stdout.close()
    run.wait()
    assert file.read_text().startswith("{")
