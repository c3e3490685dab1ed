"""A data set that cannot be used is named with its fault."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from lab.cell import preprocessing_of
from lab.dataset import Dataset, read_dataset
from lab.presets import PRESETS, changed
from model_store.errors import DataRejected, WrongUsage
from tests.lab.synthetic import CLASSES, png, write_zip

PREPROCESSING = preprocessing_of(changed(PRESETS["mini"], "image_size=8"))


def read(path: Path) -> Dataset:
    return read_dataset(path, preprocessing=PREPROCESSING)


def test_a_data_set_is_read_by_part_and_class(tmp_path: Path) -> None:
    data = read(write_zip(tmp_path / "data.zip", train=3, test=2))
    assert data.classes == CLASSES
    assert (len(data.train), len(data.test)) == (18, 12)
    assert data.train.images_by_class == dict.fromkeys(CLASSES, 3)
    assert data.train.pixels_NHWC.shape == (18, 8, 8, 3)


def test_a_domain_is_a_folder_of_the_archive(tmp_path: Path) -> None:
    path, folder = tmp_path / "data.zip", tmp_path / "kept"
    with zipfile.ZipFile(path, "w") as archive:
        for domain, name in (("signs", "stop"), ("signs", "yield"), ("cells", "round")):
            for part in ("train", "test"):
                archive.writestr(f"{domain}/{part}/{name}/0.jpg", png(name, seed=0))
    signs, cells = (
        read_dataset(path, preprocessing=PREPROCESSING, domain=domain, kept=folder)
        for domain in ("signs", "cells")
    )
    assert (signs.classes, cells.classes) == (("stop", "yield"), ("round",))
    again = read_dataset(path, preprocessing=PREPROCESSING, domain="signs", kept=folder)
    assert (again.classes, again.archive, again.digest) == (signs.classes, path, signs.digest)
    with pytest.raises(DataRejected, match="no images in folders train/<class> and test/<class>"):
        read(path)


@pytest.mark.parametrize(("part", "lacking"), [("train", "test"), ("test", "train")])
def test_missing_classes_are_named(tmp_path: Path, part: str, lacking: str) -> None:
    path = write_zip(tmp_path / "data.zip", train=2, test=2)
    with zipfile.ZipFile(path, "a") as archive:
        for name in ("yak", "zebra"):
            archive.writestr(f"{part}/{name}/0.png", png(name, seed=0))
    with pytest.raises(DataRejected, match=f"no images in {lacking}/ of 'yak', 'zebra'"):
        read(path)


def test_damaged_images_are_named_with_their_reasons(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "data.zip", train=2, test=2)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("train/ant/bad.png", b"no image")
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        place = archive.getinfo("test/bee/000.png").header_offset + 60
    data[place] ^= 255
    path.write_bytes(data)
    with pytest.raises(DataRejected, match=r"damaged images: .*train/ant/bad\.png"):
        read(path)
    with zipfile.ZipFile(path) as archive:
        kept = [one for one in archive.namelist() if "bad" not in one]
        assert "test/bee/000.png" in kept
    path.write_bytes(data.replace(b"bad.png", b"bad.gif"))
    with pytest.raises(DataRejected, match=r"test/bee/000\.png \(Bad CRC"):
        read(path)


def test_what_is_no_data_set_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.zip"
    with pytest.raises(WrongUsage, match=r"data\.zip is not a file"):
        read(path)
    path.write_bytes(b"PK")
    with pytest.raises(DataRejected, match=r"data\.zip is not a zip file"):
        read(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images/ant/0.png", png("ant", seed=0))
    with pytest.raises(DataRejected, match="no images in folders train/<class>"):
        read(path)
