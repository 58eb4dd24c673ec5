"""Wrong input, unreadable and unwritable files, closed streams: one line on the standard error, never a traceback."""

import errno
import os
import re
import sys
from pathlib import Path

import pytest
from torch import nn

from gistkit import cli
from gistkit.commands import images, wrong
from gistkit.commands import train as train_command
from gistkit.runtime.offload.host_memory import NOT_FITTING


def exits():
    raise SystemExit(3)


def number():
    return 7


def bare():
    return nn.ReLU()


def oddly_named(num_classes):
    """Layers whose names look like rich's markup."""
    net = nn.Sequential()
    net.add_module("[/b]:fire:", nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    return net.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes)])


HERE = "tests.commands.test_cli_wrong"
TRAIN = ["train", "tests.training.test_train:tiny", "--steps", "3", "--batch", "4", "--lossy", "none"]
SMALL = ["tests.commands.test_cli_plan:small", "--batch", "2", "--image-size", "32", "--hardware", "titanx"]
ACCURACY = ["accuracy", "tests.training.test_train:tiny", "--epochs", "1", "--seeds", "1", "--schemes"]
PLAN, PROFILE = ["plan", *SMALL, "--policy", "gist"], ["profile", *SMALL]
BENCH = ["bench", "--device", "cpu", "--quick", "--sizes-mib", "0.05", "--codec", "mask1"]
HUGE = str(2**70)

MODELS = [
    ("vgg_16", "model must be one of vgg16, .*; did you mean 'vgg16'"),
    ("\x1b[31m", r"model must be one of vgg16, .*, got '.x1b\[31m'; your own network is given as"),
    ("nowhere.models:net", "cannot be made .ModuleNotFoundError: .*; give package.module:factory"),
    ("../x:y", "model '../x:y' cannot be made .ValueError: "),
    ("broken:net", "cannot be made .SyntaxError: "),
    ("os:sep", "cannot be made .TypeError: "),
    (f"{HERE}:number", "the factory must return a torch.nn.Module, got int"),
    (f"{HERE}:exits", "cannot be made .SystemExit: 3"),
    (f"{HERE}:bare", "empty parameter list|needs no gradient"),
]
SIZES = [
    (["--image-size", "1"], r"Output size is too small.*; mend it|\[2, 16\] X \[4, 10\].*; mend it"),
    (["--image-size", "0"], "image_size must be from 1 to [0-9]*, got 0; leave it out"),
    (["--image-size", HUGE], f"image_size must be from 1 to [0-9]*, got {HUGE}; leave it out"),
    (["--batch", "-1"], "batch must be from 1 to [0-9]*, got -1; leave it out"),
    (["--batch", "1" * 99], r"batch must be from 1 to [0-9]*, got 1{45}\.\.\.1{12}; leave it out"),
    (["--batch", "nan"], "argument --batch: invalid int value: 'nan'"),
    (["--bogus\x1b[31m"], r"unrecognized arguments: --bogus.x1b\[31m"),
]
PLOTS = [
    (["--plot", "memory.txt"], "plot file must end in .png, .svg or .pdf, got 'memory.txt'; name one that does"),
    (["--plot", "/proc/none/x.png"], "/proc/none/x.png cannot be written: .*; name another file"),
]
FILES = [
    ("/proc/none/x", "/proc/none/x cannot be written: (No such file|Permission denied).*; name another file"),
    (".", r"the file to write must not be a folder, got \.; name a file in it"),
    ("plain/x", "plain/x cannot be written: (File exists|Not a directory)"),
    ("x" * 300, "x cannot be written: File name too long"),
    ("/dev/full", "/dev/full cannot be written: No space left on device; name another file"),
]
READ = [
    ("plain", "plain.* JSON"),
    ("/dev/full", "/dev/full"),
    ("fifo", "fifo"),
    ("/nowhere.json", "/nowhere.json"),
    (".", r"(times|got) '?\."),
    ("\x1b[31m", r".x1b\[31m"),
]
CASES = [
    *((["plan", model, *PLAN[2:]], text) for model, text in MODELS),
    *((["train", model, *TRAIN[2:]], text) for model, text in (MODELS[0], MODELS[-1])),
    *(([*PLAN, *more], text) for more, text in SIZES),
    *(([*TRAIN, *more], text) for more, text in SIZES[:4]),
    *(([*PROFILE, *more], text) for more, text in PLOTS),
    *(([*PROFILE, "--json", file], text) for file, text in FILES),
    *(([*PLAN, option, file], text) for option in ("--times", "--hardware") for file, text in READ),
    ([*PROFILE, "--hardware", "cpu", "--measure", "--times", "/dev/full"], "/dev/full cannot be written"),
    ([*PLAN, "--hardware", "h20"], "hardware must be one of titanx, .* did you mean 'h200'"),
    (["plan", "vgg16", "--image-size", "16"], "image_size must be at least 32, got 16"),
    ([*PLAN, "--budget", "lots"], r"budget must be .*, got 'lots'; write a number and a unit"),
    ([*PLAN, "--policy", "optimum"], r"policy must be one of .*; did you mean 'optimal'"),
    ([*PLAN, "--fidelity", "exact"], r"fidelity must be one of bitwise, reassociated, lossy, got 'exact'"),
    ([*PLAN, "--lossy", "fp7"], r"lossy must be None or one of .*fp7"),
    ([*TRAIN, "--data", "/nowhere"], "data directory /nowhere does not exist; give a folder"),
    ([*TRAIN, "--steps", "1"], "steps must be from 3 to 2147483648, got 1; leave it out"),
    ([*TRAIN, "--lossy", "fp7"], "fp7"),
    ([*TRAIN, "--batch", "5000"], "a batch of 5000 needs as many images, there are 1437; use a batch of at most 1437"),
    ([*TRAIN, "--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    (["train", "tests.commands.test_cli_plan:normed", *TRAIN[2:]], "the model must return class scores, for 4 images"),
    ([*ACCURACY, "fp32,fp9"], "scheme must be one of fp32, .*; got 'fp9'; did you mean '"),
    ([*ACCURACY, "fp8", "--density", "5"], "density is measured in fp32, got schemes fp8; add fp32"),
    ([*ACCURACY, "fp32", "--out", "plain"], "plain/rows.jsonl cannot be written: "),
    (["accuracy", f"{HERE}:bare", *ACCURACY[2:], "fp8"], "scheme fp8 must round something of what the network keeps"),
    (["accuracy", f"{HERE}:bare", *ACCURACY[2:], "fp32"], "the model must return class scores, for 2 images of 10"),
    ([*BENCH, "--codec", "zvc", "csr+fp9"], r"argument --codec: invalid choice: 'csr\+fp9' \(choose from .*zvc"),
    ([*BENCH, "--sizes-mib", "0"], "sizes-mib: must be from 0.01 to 1048576, got '0'"),
    ([*BENCH, "--sizes-mib", "64", "much"], "sizes-mib: invalid .* value: 'much'"),
    (["calibrate", "--device", "tpu"], "device must be cpu, cuda or cuda:N, got 'tpu'"),
    ([], "the following arguments are required: COMMAND"),
]


@pytest.fixture
def odd_folder(tmp_path, monkeypatch):
    (tmp_path / "plain").write_text("no JSON")
    (tmp_path / "broken.py").write_text("def (:")
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("odd_folder")
@pytest.mark.parametrize(("arguments", "text"), CASES)
def test_odd_input_is_one_line_and_status_two(arguments, text, capfd):
    try:
        status = cli.main(arguments)
    except SystemExit as exit_:  # argparse's
        status = exit_.code
    shown = capfd.readouterr()
    assert status == 2 and shown.out == "" and "Traceback" not in shown.err
    last = shown.err.splitlines()[-1]
    assert re.match(r"gistkit( \w+)?: error: ", last) and last.isprintable()
    assert re.search(text, last), last


@pytest.mark.parametrize("command", [PLAN, PROFILE])
def test_names_that_look_like_markup_are_shown_as_they_are(command, capsys):
    assert cli.main([command[0], f"{HERE}:oddly_named", *command[2:]]) == 0
    assert "[/b]:fire:.1" in capsys.readouterr().out


def test_memory_that_runs_out_is_said_in_a_line(monkeypatch, capsys):
    def run(*_):
        raise RuntimeError(f"{NOT_FITTING[3]}: tried to allocate 9 TiB")

    monkeypatch.setattr(train_command.Comparison, "run", run)
    assert cli.main(TRAIN) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "too little memory (out of memory: tried to allocate 9 TiB); take a smaller batch" in last


def test_a_command_that_is_cut_off_leaves_no_file(tmp_path, monkeypatch, capsys):
    def cut_off(*_, **__):
        raise KeyboardInterrupt

    file = tmp_path / "new" / "times.json"
    monkeypatch.setattr(images, "captured", cut_off)
    assert cli.main([*PROFILE, "--hardware", "cpu", "--measure", "--times", str(file)]) == 130
    assert file.parent.is_dir() and not list(file.parent.iterdir())
    assert capsys.readouterr().err.endswith("gistkit: interrupted\n")


@pytest.mark.parametrize("before", [None, "old"])
def test_a_file_is_written_whole_or_not_at_all(before, tmp_path):
    file, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(file)
    if before:
        file.write_text(before)
        file.chmod(0o600)
    with pytest.raises(UnicodeEncodeError):
        wrong.write(link, "x" * 2**20 + "\udc80")  # fails when the first half is on disk
    with (
        pytest.raises(wrong.InputError, match=r"link\.json cannot be written: No space left"),
        wrong.writing(link) as half,
    ):
        half.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert [p.name for p in tmp_path.iterdir() if p != link] == (["real.json"] if before else [])
    assert not before or file.read_text() == before
    wrong.write(link, "new")
    assert link.is_symlink() and file.read_text() == "new"
    assert not before or file.stat().st_mode & 0o777 == 0o600


def test_a_pipe_is_written_as_it_is(capfd):
    wrong.write(Path("/dev/stdout"), "new")
    assert capfd.readouterr().out == "new"
    source, sink = os.pipe()
    wrong.write(Path(f"/dev/fd/{sink}"), "new")
    assert os.read(source, 9) == b"new"


@pytest.mark.parametrize(
    ("output", "status", "said"),
    [("full", 2, "gistkit: error: [Errno 28] No space left on device\n"), ("without a reader", 141, "")],
)
def test_output_that_cannot_be_written_loses_no_file(output, status, said, tmp_path, monkeypatch, capfd):
    if output == "full":
        end = os.open("/dev/full", os.O_WRONLY)
    else:
        source, end = os.pipe()
        os.close(source)
    before = os.dup(1)
    os.dup2(end, 1)
    os.close(end)
    monkeypatch.setattr(sys, "stdout", open(1, "w", closefd=False))
    try:
        assert cli.main(["profile", *SMALL, "--json", str(tmp_path / "rows")]) == status
        sys.stdout.close()  # as the interpreter does at its end, without an error
    finally:
        os.dup2(before, 1)
        os.close(before)
    assert capfd.readouterr().err == said
    assert (tmp_path / "rows").read_text().startswith("{")
