"""Reading images: what comes out, in which order, and what a bad folder answers."""

import os
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from PIL import EpsImagePlugin, Image

from gistkit.errors import DataError
from gistkit.training import Comparison, TrainSettings, data


def save(path, size=(40, 40), colour=(10, 20, 30), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path)


@pytest.fixture
def folder(tmp_path):
    for label, colour in (("ape", (255, 0, 0)), ("bee", (0, 255, 0))):
        for i in range(4):
            save(tmp_path / label / f"{i}.png", colour=colour)
    return tmp_path


def test_class_folders_directly(folder):
    train, test = data.open_images(str(folder), 32)
    assert test is None
    assert train.classes == ("ape", "bee") and train.labels.tolist() == [0] * 4 + [1] * 4
    pixels = train.pixels([0, 7])
    assert pixels.dtype == torch.uint8 and pixels.shape == (2, 3, 32, 32) and pixels.is_contiguous()
    assert pixels[0, :, 5, 5].tolist() == [255, 0, 0] and pixels[1, :, 5, 5].tolist() == [0, 255, 0]


def test_train_and_test_folders_share_the_training_classes(tmp_path, held_out="val"):
    for label in ("ape", "bee", "cow"):
        save(tmp_path / "train" / label / "0.png")
    save(tmp_path / held_out / "cow" / "deep" / "0.JPG")
    train, test = data.open_images(str(tmp_path), 32)
    assert test is not None and train.classes == test.classes == ("ape", "bee", "cow")
    assert test.labels.tolist() == [2]


def test_other_files_and_hidden_ones_are_left_out(folder):
    (folder / "ape" / "notes.txt").write_text("not an image")
    (folder / "ape" / ".hidden.png").write_text("not an image")
    (folder / ".cache").mkdir()
    train, _ = data.open_images(str(folder), 32)
    assert len(train.labels) == 8 and len(train.classes) == 2


@pytest.mark.parametrize(("mode", "size"), [("RGB", (64, 48)), ("L", (7, 100)), ("CMYK", (33, 31))])
def test_any_mode_and_size_becomes_one_shape(tmp_path, mode, size):
    path = tmp_path / ("x.tif" if mode == "CMYK" else "x.png")
    save(path, size=size, colour=(255, 255, 255), mode=mode)
    image = data.read_image(path, 32)
    assert image.shape == (3, 32, 32) and image.is_contiguous() and image.unique().tolist() == [255]


def test_the_middle_is_cut_out_at_scale(tmp_path):
    """96 x 32, left third red, middle green, right blue: only the middle is left."""
    picture = Image.new("RGB", (96, 32))
    for i, colour in enumerate([(255, 0, 0), (0, 255, 0), (0, 0, 255)]):
        picture.paste(colour, (32 * i, 0, 32 * i + 32, 32))
    picture.save(tmp_path / "x.png")
    image = data.read_image(tmp_path / "x.png", 32)
    assert torch.equal(image, torch.tensor([0, 255, 0], dtype=torch.uint8).view(3, 1, 1).expand(3, 32, 32))


def test_batches_depend_on_the_seed_alone_and_cover_each_epoch():
    train, test = data.open_images("digits", 32)
    assert test is not None and (len(train.labels), len(test.labels)) == (1437, 360)
    first = list(data.batches(train, 16, 3, seed=1))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, data.batches(train, 16, 3, seed=1), strict=True))
    assert not torch.equal(first[0][0], next(data.batches(train, 16, 1, seed=2))[0])
    x, y = first[0]
    assert x.shape == (16, 3, 32, 32) and x.dtype == torch.float32 and x.is_contiguous()
    assert y.shape == (16,) and y.dtype == torch.int64


def test_epochs_show_every_image_once_in_new_orders(folder):
    train = replace(data.open_images(str(folder), 32)[0], labels=torch.arange(8))
    shown = [y.tolist() for _, y in data.batches(train, 4, 4, seed=0)]
    assert sorted(shown[0] + shown[1]) == sorted(shown[2] + shown[3]) == list(range(8))
    assert shown[0] + shown[1] != shown[2] + shown[3]
    assert len(list(data.batches(train, 5, 3, seed=0))) == 3


def test_a_test_class_without_training_images_is_refused(tmp_path):
    save(tmp_path / "train" / "ape" / "0.png")
    save(tmp_path / "test" / "yak" / "0.png")
    with pytest.raises(DataError, match="test has classes that the training images lack: yak; remove them"):
        data.open_images(str(tmp_path), 32)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"no image at all", r"cannot be read as an image \(.+\); replace or remove it"),
        (b"P4 50000 50000\n", r"cannot be read as an image .*2500000000 pixels. exceeds limit"),
        ("EPS", "cannot be read as an image"),
        ("FIFO", "is no regular file; replace or remove it"),
        ("/dev/zero", "is no regular file"),
        ("nowhere", "is no regular file"),
        ("../ape/1.png", None),
    ],
)
def test_what_is_no_image_is_told_and_not_obeyed(folder, content, text, monkeypatch):
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_: pytest.fail("a file's program was run"))
    path = folder / "bee" / "2.png"
    path.unlink()
    if content == "FIFO":
        os.mkfifo(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content.isupper():
        Image.new("RGB", (40, 40)).save(path, format=content)
    else:
        path.symlink_to(content)
    images, _ = data.open_images(str(folder), 32)
    with pytest.raises(DataError, match=rf"bee/2\.png {text}") if text else nullcontext():
        images.check(range(8))


@pytest.mark.parametrize("root", ["train", "test"])
def test_images_that_are_drawn_are_decoded_before_training(folder, root):
    """A truncated file has a whole header. The third epoch of 2 batches of 3 draws what the first two leave out."""
    for name in ("train", "test"):
        shutil.copytree(folder / "ape", folder / name / "ape")
        shutil.copytree(folder / "bee", folder / name / "bee")
    settings = TrainSettings("tests.training.test_train:tiny", str(folder), steps=3, batch=3)
    orders = [i for part in data.orders(8, 3, 5, settings.seed) for i in part.tolist()]
    late = next(i for i in orders if i not in orders[:9])
    path = folder / root / ("ape", "bee")[late // 4] / f"{late % 4}.png"
    path.write_bytes(path.read_bytes()[:-30])
    if root == "train":
        Comparison(settings)
        settings = replace(settings, steps=5)
    with pytest.raises(DataError, match=rf"{path} cannot be read as an image \(.+\); replace or remove it"):
        Comparison(settings)


@pytest.mark.parametrize(("source", "package", "extra"), [("digits", "sklearn", "digits"), ("folder", "PIL", "images")])
def test_a_missing_package_names_its_extra(folder, monkeypatch, source, package, extra):
    for name in [package, *(m for m in sys.modules if m.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError, match=rf"pip install 'gistkit\[{extra}\]'"):
        data.open_images("digits" if source == "digits" else str(folder), 32)
