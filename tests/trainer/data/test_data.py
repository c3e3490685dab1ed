from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from model_store.errors import DataRejected, SpecInvalid, WrongUsage
from model_store.records.manifest import Preprocessing
from tests.abuse.images import flat, heic_bomb, heic_of_tiles
from tests.trainer.folders import SIZE, Listening, write_classes
from trainer.data.checks import (
    refuse_known_classes,
    refuse_no_images,
    refuse_small_classes,
    refuse_unknown_classes,
)
from trainer.data.folders import LabelledImages, list_classes, note_ignored, read_images

PREPROCESSING = Preprocessing(image_size=SIZE)


def read(
    folder: Path, *, skip_bad: bool = False, progress: Listening | None = None
) -> LabelledImages:
    return read_images(
        list_classes(folder),
        preprocessing=PREPROCESSING,
        skip_bad=skip_bad,
        progress=progress or Listening(),
    )


def test_classes_are_the_folders_by_name(tmp_path: Path) -> None:
    write_classes(tmp_path, ["zebra", "ant", "Bee"], images=2)
    assert list_classes(tmp_path).names == ("Bee", "ant", "zebra")


def test_every_image_is_read_with_its_class_in_order(tmp_path: Path) -> None:
    write_classes(tmp_path, ["a", "b"], images=3)
    images = read(tmp_path)
    assert images.labels_N.tolist() == [0, 0, 0, 1, 1, 1]
    for row, path in enumerate(sorted(tmp_path.glob("*/*.png"))):
        np.testing.assert_array_equal(images.pixels_NHWC[row], np.asarray(Image.open(path)))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "CMYK", "I;16"])
def test_images_of_any_mode_and_size_are_handled(tmp_path: Path, mode: str) -> None:
    write_classes(tmp_path, ["a"], images=1)
    odd = Image.fromarray(np.arange(20 * 30, dtype=np.uint16).reshape(20, 30) * 100)
    image = odd if mode == "I;16" else Image.new("RGB", (30, 20), "red").convert(mode)
    image.save(tmp_path / "a" / ("odd.tiff" if mode == "CMYK" else "odd.png"))
    assert read(tmp_path).pixels_NHWC.shape == (2, SIZE, SIZE, 3)


def test_photos_of_phones_are_learnt_from(tmp_path: Path) -> None:
    write_classes(tmp_path, ["a"], images=1)
    for name, data in {
        "tiles.HEIC": heic_of_tiles(),
        "b.avif": flat(64, 64, mode="RGB", kind="AVIF"),
    }.items():
        (tmp_path / "a" / name).write_bytes(data)
    (tmp_path / "a/bomb.heif").write_bytes(heic_bomb())
    with pytest.raises(DataRejected, match=r"bomb.heif \(.*pixels"):
        read(tmp_path)
    assert len(read(tmp_path, skip_bad=True).labels_N) == 3


def test_a_photo_lies_as_its_camera_was_held(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    image = Image.new("RGB", (16, 16), "black")
    image.paste("white", (0, 0, 16, 8))
    turned = image.getexif()
    turned[0x0112] = 3  # upside down
    image.save(tmp_path / "a" / "photo.png", exif=turned)
    pixels = read(tmp_path).pixels_NHWC[0]
    assert pixels[0].mean() < 10
    assert pixels[-1].mean() > 245


def test_stray_files_are_ignored_and_noted(tmp_path: Path) -> None:
    write_classes(tmp_path, ["a"], images=2)
    strays = [".DS_Store", "readme.txt", "a/.DS_Store", "a/Thumbs.db", "a/notes.txt"]
    for name in strays:
        (tmp_path / name).write_bytes(b"not an image")
    (tmp_path / "a" / "deeper").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "__MACOSX").mkdir()
    listing, progress = list_classes(tmp_path), Listening()
    assert (listing.names, listing.images) == (("a",), 2)
    assert len(listing.ignored) == len(strays) + 3
    note_ignored(listing, progress)
    assert ".DS_Store" in progress.notes[0]
    assert "and 3 more" in progress.notes[0]


def test_images_beside_the_folders_of_classes_are_called_images(tmp_path: Path) -> None:
    write_classes(tmp_path, ["a"], images=2)
    (tmp_path / "a" / "000.png").rename(tmp_path / "loose.png")
    (tmp_path / "readme.txt").touch()
    progress = Listening()
    note_ignored(list_classes(tmp_path), progress)
    assert [note.partition(", ")[2] for note in progress.notes] == [
        "beside the folders of classes: loose.png",
        "not images: readme.txt",
    ]


def test_an_image_is_known_by_its_content_not_its_name(tmp_path: Path) -> None:
    write_classes(tmp_path, ["a"], images=2)
    (tmp_path / "a" / "000.png").rename(tmp_path / "a" / "nameless")
    (tmp_path / "a" / "001.png").rename(tmp_path / "a" / "wrong.JPG")
    assert len(read(tmp_path)) == 2


def test_links_to_images_are_images(tmp_path: Path) -> None:
    data = write_classes(tmp_path / "data", ["a"], images=2)
    elsewhere = tmp_path / "elsewhere.png"
    (data / "a" / "000.png").rename(elsewhere)
    (data / "a" / "000.png").symlink_to(elsewhere)
    assert len(read(data)) == 2


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    write_classes(tmp_path, ["a"], images=2)
    os.mkfifo(tmp_path / "a" / "pipe.png")
    assert len(read(tmp_path)) == 2


def test_each_unreadable_image_is_named_with_the_way_on(tmp_path: Path) -> None:
    write_classes(tmp_path, ["a", "b"], images=3)
    whole = (tmp_path / "a" / "001.png").read_bytes()
    (tmp_path / "a" / "001.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "b" / "002.png").write_bytes(b"")
    (tmp_path / "b" / "gone.png").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataRejected, match="3 images cannot be read") as refused:
        read(tmp_path)
    for name in ("a/001.png", "b/002.png", "b/gone.png", "`skip_bad`"):
        assert name in str(refused.value)


def test_skipping_bad_images_keeps_the_good_ones_and_says_so(tmp_path: Path) -> None:
    write_classes(tmp_path, ["a", "b"], images=3)
    (tmp_path / "a" / "001.png").write_bytes(b"broken")
    progress = Listening()
    images = read(tmp_path, skip_bad=True, progress=progress)
    assert images.labels_N.tolist() == [0, 0, 1, 1, 1]
    assert "going on without 1 image" in progress.notes[0]
    assert "a/001.png" in progress.notes[0]


def test_many_unreadable_images_are_counted_not_all_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for index in range(25):
        (tmp_path / "a" / f"{index}.png").write_bytes(b"broken")
    with pytest.raises(DataRejected, match=r"25 images .* and 5 more"):
        read(tmp_path)


def test_hostile_file_names_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "\x1b[31mred.png").write_bytes(b"broken")
    with pytest.raises(DataRejected) as refused:
        read(tmp_path)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("name", [" padded", "bell\x07", "x" * 201])
def test_hostile_class_names_are_refused(tmp_path: Path, name: str) -> None:
    write_classes(tmp_path, [name], images=2)
    with pytest.raises(SpecInvalid, match="class name"):
        list_classes(tmp_path)


def test_a_folder_without_classes_is_wrong_usage_that_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match="does not exist"):
        list_classes(tmp_path / "missing")
    with pytest.raises(WrongUsage, match="is empty"):
        list_classes(tmp_path)
    Image.new("RGB", (8, 8)).save(tmp_path / "loose.png")
    with pytest.raises(WrongUsage, match="no class folders"):
        list_classes(tmp_path)
    with pytest.raises(WrongUsage, match="is not a folder"):
        list_classes(tmp_path / "loose.png")


def test_too_few_images_are_refused_with_the_class_and_both_numbers(tmp_path: Path) -> None:
    write_classes(tmp_path, ["plenty"], images=2)
    write_classes(tmp_path, ["rare"], images=1)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataRejected) as refused:
        refuse_small_classes(list_classes(tmp_path).images_by_class)
    message = str(refused.value)
    assert "'rare' has 1 image" in message
    assert "'none' has 0 images" in message
    assert "at least 2" in message
    assert "plenty" not in message


def test_what_was_left_out_counts_no_more(tmp_path: Path) -> None:
    write_classes(tmp_path, ["a"], images=2)
    (tmp_path / "a" / "000.png").write_bytes(b"broken")
    images = read(tmp_path, skip_bad=True)
    with pytest.raises(DataRejected, match="'a' has 1 image"):
        refuse_small_classes(images.images_by_class)


def test_known_and_unknown_classes_are_named(tmp_path: Path) -> None:
    listing = list_classes(write_classes(tmp_path, ["a", "b"], images=2))
    with pytest.raises(DataRejected, match="knows 'b' already"):
        refuse_known_classes(listing, {"b", "c"})
    with pytest.raises(WrongUsage, match="holds 'a', which"):
        refuse_unknown_classes(listing, {"b", "c"}, setting="val_data")


def test_no_images_are_refused_with_the_use_they_were_meant_for(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for setting, to in (("data", "learn from"), ("val_data", "judge by")):
        with pytest.raises(WrongUsage, match=f"^`{setting}=.*` holds no images to {to}$"):
            refuse_no_images(read(tmp_path), list_classes(tmp_path), setting=setting, to=to)
