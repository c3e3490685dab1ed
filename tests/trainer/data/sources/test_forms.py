"""One set of images is the same data in every form."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model_store.errors import DataRejected, WrongUsage
from tests.trainer.data.sources.forms import (
    coco_of,
    csv_of,
    files_of,
    flattened,
    jsonl,
    listed,
    read,
    tarred,
    written_csv,
    zipped,
)
from tests.trainer.folders import Listening, write_classes
from trainer.data.folders import note_ignored
from trainer.data.sources.forms import list_judged, list_strangers
from trainer.data.sources.place import name_of

Make = Callable[[Path, Path], Path]


def imagefolder(folder: Path, into: Path, *, rows: str = "csv") -> Path:
    """Hugging Face: files side by side, and `metadata.csv` or `metadata.jsonl`."""
    labels = flattened(folder, into)
    if rows == "csv":
        written_csv(into / "metadata.csv", [("file_name", "label"), *labels.items()])
    else:
        jsonl(
            into / "metadata.jsonl",
            [{"file_name": name, "label": label} for name, label in labels.items()],
        )
    return into


def fiftyone(folder: Path, into: Path) -> Path:
    """FiftyOneImageClassificationDataset: `data/` and `labels.json`, by names without endings."""
    labels = flattened(folder, into / "data")
    classes = sorted(set(labels.values()))
    by_stem = {name.rpartition(".")[0]: classes.index(label) for name, label in labels.items()}
    (into / "labels.json").write_text(json.dumps({"classes": classes, "labels": by_stem}))
    return into


def fiftyone_named(folder: Path, into: Path) -> Path:
    """The same with confidences: names of classes, and no list of them."""
    labels = flattened(folder, into / "data")
    by_stem = {
        name.rpartition(".")[0]: {"label": label, "confidence": 0.9}
        for name, label in labels.items()
    }
    (into / "labels.json").write_text(json.dumps({"classes": None, "labels": by_stem}))
    return into


def coco(folder: Path, into: Path) -> Path:
    labels = flattened(folder, into)
    (into / "classes.json").write_text(json.dumps(coco_of(labels)))
    return into / "classes.json"


def coco_by_cvat(folder: Path, into: Path) -> Path:
    """CVAT's COCO 1.0: `annotations/instances_default.json` and `images/default/`."""
    labels = flattened(folder, into / "images" / "default")
    (into / "annotations").mkdir()
    (into / "annotations" / "instances_default.json").write_text(json.dumps(coco_of(labels)))
    return zipped(into, into.with_suffix(".zip"))


def coco_by_roboflow(folder: Path, into: Path) -> Path:
    labels = flattened(folder, into)
    (into / "_annotations.coco.json").write_text(json.dumps(coco_of(labels)))
    return into


def datumaro(folder: Path, into: Path) -> Path:
    """CVAT's Datumaro 1.0: `annotations/default.json` and `images/default/`."""
    labels = flattened(folder, into / "images" / "default")
    names = sorted(set(labels.values()))
    document = {
        "info": {},
        "categories": {"label": {"labels": [{"name": name} for name in names]}},
        "items": [
            {
                "id": name.rpartition(".")[0],
                "annotations": [{"id": 0, "type": "label", "label_id": names.index(label)}],
                "image": {"path": name, "size": [8, 8]},
            }
            for name, label in labels.items()
        ],
    }
    (into / "annotations").mkdir()
    (into / "annotations" / "default.json").write_text(json.dumps(document))
    return into


def imagenet_by_cvat(folder: Path, into: Path) -> Path:
    """CVAT's ImageNet 1.0: a zip with a folder a class."""
    return zipped(folder, into.with_suffix(".zip"))


def table_in_zip(folder: Path, into: Path) -> Path:
    labels = flattened(folder, into / "images")
    rows = [(f"images/{name}", label) for name, label in labels.items()]
    written_csv(into / "labels.csv", [("file", "label"), *rows])
    return zipped(into, into.with_suffix(".zip"))


FORMS: dict[str, Make] = {
    "zip": lambda folder, into: zipped(folder, into.with_suffix(".zip")),
    "zip of a folder": lambda folder, into: zipped(
        folder, into.with_suffix(".zip"), inside="photos/"
    ),
    "zip by Windows": lambda folder, into: _by_windows(folder, into.with_suffix(".zip")),
    "tar": lambda folder, into: tarred(folder, into.with_suffix(".tar")),
    "tar.gz of a folder": lambda folder, into: tarred(
        folder, into.with_suffix(".tar.gz"), inside="photos"
    ),
    "tar.bz2": lambda folder, into: tarred(folder, into.with_suffix(".tar.bz2")),
    "csv": lambda folder, into: csv_of(folder, folder.parent / "photos.csv"),
    "csv by Excel": lambda folder, into: _by_excel(folder, folder.parent / "photos.csv"),
    "jsonl": lambda folder, into: jsonl(
        folder.parent / "photos.jsonl",
        [
            {"file": f"{folder.name}/{file.relative_to(folder)}", "label": file.parent.name}
            for file in files_of(folder)
        ],
    ),
    "imagefolder with metadata.csv": imagefolder,
    "imagefolder with metadata.jsonl": lambda folder, into: imagefolder(folder, into, rows="json"),
    "zip of an imagefolder": lambda folder, into: zipped(
        imagefolder(folder, into), into.with_suffix(".zip"), inside="photos/"
    ),
    "FiftyOne": fiftyone,
    "FiftyOne with confidences": fiftyone_named,
    "tar of FiftyOne": lambda folder, into: tarred(
        fiftyone(folder, into), into.with_suffix(".tar")
    ),
    "COCO": coco,
    "COCO by CVAT": coco_by_cvat,
    "COCO by Roboflow": coco_by_roboflow,
    "Datumaro": datumaro,
    "ImageNet by CVAT": imagenet_by_cvat,
    "zip with a table": table_in_zip,
}


def _by_windows(folder: Path, path: Path) -> Path:
    import zipfile

    with zipfile.ZipFile(path, "w") as archive:
        for file in files_of(folder):
            archive.writestr(str(file.relative_to(folder)).replace("/", "\\"), file.read_bytes())
    return path


def _by_excel(folder: Path, path: Path) -> Path:
    text = csv_of(folder, path).read_text().replace(",", ";").replace("/", "\\")
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    return path


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_pixels_and_labels_of_the_folder_in_its_order(
    tmp_path: Path, form: str
) -> None:
    folder = write_classes(tmp_path / "folder", ["zebra", "ant", "Bée"], images=3)
    expected = read(listed(folder))
    found = read(listed(FORMS[form](folder, tmp_path / "made")))
    assert found.classes == expected.classes
    np.testing.assert_array_equal(found.labels_N, expected.labels_N)
    np.testing.assert_array_equal(found.pixels_NHWC, expected.pixels_NHWC)


@pytest.mark.parametrize("form", ["zip", "csv", "FiftyOne", "COCO", "zip with a table"])
def test_images_of_no_class_come_in_every_form(tmp_path: Path, form: str) -> None:
    folder = write_classes(tmp_path / "folder", ["a", "b"], images=3)
    made = FORMS[form](folder, tmp_path / "made")
    assert list_strangers(made, setting="unknown_data").images == 6


def test_loose_images_of_no_class_come_in_a_zip(tmp_path: Path) -> None:
    flattened(write_classes(tmp_path / "folder", ["a"], images=3), tmp_path / "loose")
    made = zipped(tmp_path / "loose", tmp_path / "loose.zip")
    assert list_strangers(made, setting="unknown_data").images == 3


def split_in(folder: Path, *names: str) -> Path:
    for seed, name in enumerate(names):
        write_classes(folder / name, ["a", "b"], images=2 + seed, seed=seed)
    return folder


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("names", "judge", "note"),
    [
        (("train", "val"), 6, "learning from train, judging by val"),
        (("Train", "VALID"), 6, "judging by val"),
        (("train", "validation", "test"), 6, "test left for `dne-train evaluate`"),
        (("train", "test"), 6, "judging by test"),
        (("train",), None, "is split: learning from train"),
    ],
)
def test_a_part_to_judge_by_comes_with_the_data(
    tmp_path: Path, names: tuple[str, ...], judge: int | None, note: str, packed: bool
) -> None:
    data = split_in(tmp_path / "photos", *names)
    if packed:
        data = zipped(data, tmp_path / "photos.zip", inside="photos/")
    listing = listed(data)
    assert listing.images == 4
    assert (listing.judge.images if listing.judge else None) == judge
    assert note in listing.notes[0]


def test_evaluate_takes_the_test_part_and_says_so(tmp_path: Path) -> None:
    listing = list_judged(split_in(tmp_path / "p", "train", "val", "test"), setting="data")
    assert listing.images == 8
    assert "judging by test" in listing.notes[0]
    assert list_judged(split_in(tmp_path / "q", "train", "val"), setting="data").images == 6
    with pytest.raises(WrongUsage, match="give its train part"):
        list_judged(split_in(tmp_path / "r", "train"), setting="data")


def test_other_images_to_judge_by_count_before_the_part(tmp_path: Path) -> None:
    data = split_in(tmp_path / "photos", "train", "val")
    other = write_classes(tmp_path / "other", ["a", "b"], images=7)
    listing = listed(data, val_data=other)
    assert listing.judge is not None
    assert listing.judge.images == 14
    assert "val left for" in listing.notes[0]


def test_two_names_for_one_part_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match="two parts for val"):
        listed(split_in(tmp_path / "photos", "train", "val", "valid"))


def test_a_class_may_be_named_train(tmp_path: Path) -> None:
    folder = write_classes(tmp_path / "vehicles", ["train", "bus"], images=2)
    assert listed(folder).names == ("bus", "train")
    assert listed(write_classes(tmp_path / "one", ["train"], images=2)).names == ("train",)


@pytest.mark.parametrize("make", [imagefolder, fiftyone, coco_by_roboflow])
def test_parts_have_tables_of_their_own(tmp_path: Path, make: Make) -> None:
    folder = write_classes(tmp_path / "folder", ["a", "b"], images=3)
    make(folder, tmp_path / "photos" / "train")
    make(folder, tmp_path / "photos" / "validation")
    listing = listed(tmp_path / "photos")
    assert listing.judge is not None
    assert (listing.images, listing.judge.images) == (6, 6)


def test_a_column_names_the_part(tmp_path: Path) -> None:
    folder = write_classes(tmp_path / "folder", ["a", "b"], images=4)
    rows = [
        (
            str(file.relative_to(tmp_path)),
            file.parent.name,
            "val" if "000" in file.name else "train",
        )
        for file in files_of(folder)
    ]
    table = written_csv(tmp_path / "p.csv", [("file", "label", "split"), *rows])
    listing = listed(table)
    assert listing.judge is not None
    assert (listing.images, listing.judge.images) == (6, 2)
    rows[0] = (*rows[0][:2], "fold1")
    rows[1] = (*rows[1][:2], "")
    written_csv(table, [("file", "label", "split"), *rows])
    with pytest.raises(DataRejected, match=r"row 2 .*'fold1'; parts are named train, val and test"):
        listed(table)
    rows[0] = (*rows[0][:2], "train")
    written_csv(table, [("file", "label", "split"), *rows])
    with pytest.raises(DataRejected, match="1 row without a part"):
        listed(table)


def test_several_files_of_annotations_are_parts(tmp_path: Path) -> None:
    folder = write_classes(tmp_path / "folder", ["a", "b"], images=3)
    (tmp_path / "coco" / "annotations").mkdir(parents=True)
    for part in ("train", "val"):
        labels = flattened(folder, tmp_path / "coco" / "images" / f"{part}2017")
        table = tmp_path / "coco" / "annotations" / f"instances_{part}2017.json"
        table.write_text(json.dumps(coco_of(labels)))
    listing = listed(tmp_path / "coco")
    assert listing.judge is not None
    assert (listing.images, listing.judge.images) == (6, 6)


def test_groups_come_from_folders_in_an_archive_too(tmp_path: Path) -> None:
    write_classes(tmp_path / "all" / "cats", ["puma", "lynx"], images=2)
    write_classes(tmp_path / "all" / "birds", ["eagle"], images=2)
    listing = listed(zipped(tmp_path / "all", tmp_path / "all.zip"), hierarchy="folders")
    assert listing.parents == {"puma": "cats", "lynx": "cats", "eagle": "birds"}
    assert listing.images == 6
    table = csv_of(tmp_path / "all" / "cats", tmp_path / "cats.csv")
    with pytest.raises(WrongUsage, match="`hierarchy=FILE`"):
        listed(table, hierarchy="folders")


def test_metadata_without_labels_leaves_the_classes_to_the_folders(tmp_path: Path) -> None:
    folder = write_classes(tmp_path / "folder", ["a", "b"], images=2)
    written_csv(folder / "metadata.csv", [("file_name", "caption"), ("a/000.png", "a cat")])
    (folder / "features.parquet").write_bytes(b"PAR1")
    assert listed(folder).names == ("a", "b")


def test_exports_of_cvat_with_json_beside_class_folders_are_folders(tmp_path: Path) -> None:
    """CVAT's Ultralytics YOLO Classification: `labels.json` in each part, for CVAT itself."""
    for part in ("train", "val"):
        write_classes(tmp_path / "yolo" / part, ["cat", "dog"], images=2)
        (tmp_path / "yolo" / part / "labels.json").write_text('{"cat/000.png": ["cat"]}')
    listing = listed(tmp_path / "yolo")
    assert listing.names == ("cat", "dog")
    assert listing.judge is not None


def test_columns_that_are_not_used_are_named(tmp_path: Path) -> None:
    folder = write_classes(tmp_path / "folder", ["a"], images=2)
    rows = [(str(file.relative_to(tmp_path)), "a", "8") for file in files_of(folder)]
    listing = listed(written_csv(tmp_path / "p.csv", [("file", "label", "width"), *rows]))
    progress = Listening()
    note_ignored(listing, progress)
    assert "not used: 'width'" in progress.notes[0]


def test_data_is_named_without_its_ending(tmp_path: Path) -> None:
    assert name_of(tmp_path / "animals.tar.gz") == "animals"
    assert name_of(tmp_path / "animals.ZIP") == "animals"
    (tmp_path / "photos.zip").mkdir()
    assert name_of(tmp_path / "photos.zip") == "photos.zip"


def test_an_archive_in_an_archive_is_named(tmp_path: Path) -> None:
    inner = zipped(write_classes(tmp_path / "folder", ["a"], images=2), tmp_path / "inner.zip")
    (tmp_path / "outer").mkdir()
    inner.rename(tmp_path / "outer" / "inner.zip")
    with pytest.raises(WrongUsage, match=r"holds an archive, inner\.zip: give that one"):
        listed(tmp_path / "outer")
    with pytest.raises(WrongUsage, match=r"holds another archive, inner\.zip: unpack it"):
        listed(zipped(tmp_path / "outer", tmp_path / "outer.zip"))


def test_a_file_of_another_kind_is_refused_with_those_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("cats")
    with pytest.raises(WrongUsage, match=r"is not a folder, .*\.zip.*\.parquet"):
        listed(tmp_path / "notes.txt")
    with pytest.raises(WrongUsage, match="does not exist"):
        listed(tmp_path / "gone.zip")


def test_bad_images_are_named_with_their_archive(tmp_path: Path) -> None:
    folder = write_classes(tmp_path / "folder", ["cat"], images=2)
    (folder / "cat" / "001.png").write_bytes(b"broken")
    listing = listed(zipped(folder, tmp_path / "photos.zip"))
    with pytest.raises(DataRejected, match=r"read: photos\.zip: cat/001\.png \(not an image"):
        read(listing)
    table = csv_of(folder, tmp_path / "photos.csv")
    with pytest.raises(DataRejected, match=r"read: folder/cat/001\.png \(not an image"):
        read(listed(table))


def test_strays_in_an_archive_are_ignored_and_named(tmp_path: Path) -> None:
    folder = write_classes(tmp_path / "folder", ["cat"], images=2)
    (folder / "__MACOSX").mkdir()
    (folder / "__MACOSX" / "._000.png").write_bytes(b"\0")
    (folder / "cat" / "._000.png").write_bytes(b"\0")
    (folder / "readme.txt").write_text("cats")
    listing, progress = listed(zipped(folder, tmp_path / "photos.zip")), Listening()
    assert (listing.names, listing.images) == (("cat",), 2)
    note_ignored(replace(listing, notes=()), progress)
    assert "photos.zip: readme.txt" in progress.notes[0]
