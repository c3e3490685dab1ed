"""Every bad row is named with its number and file, and nothing is read by halves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model_store.errors import DataRejected
from tests.trainer.data.sources.forms import coco_of, flattened, jsonl, listed, written_csv
from tests.trainer.folders import write_classes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_classes(tmp_path / "folder", ["a", "b"], images=3)


GOOD = [("folder/a/000.png", "a"), ("folder/b/000.png", "b")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (("folder/a/gone.png", "a"), r"row 4 \(folder/a/gone.png\) does not exist"),
        (("folder/a", "a"), r"row 4 \(folder/a\) does not exist"),
        (("/etc/passwd", "a"), r"row 4 \(/etc/passwd\) is an absolute path; give paths relative"),
        (("C:\\photos\\a.png", "a"), r"is an absolute path"),
        (("folder/../../a.png", "a"), r"leads out of the data with `\.\.`"),
        (("https://example.org/a.png", "a"), r"is an address; images are read from files only"),
        (("folder/a/001.png", ""), r"row 4 \(folder/a/001.png\) has no label"),
        (("folder/a/001.png", "  "), r"has no label"),
        (("folder/a/001.png", "a/b"), r"has a label that cannot be used: .*'a/b' cannot name"),
        (("folder/a/001.png", " a"), r"cannot be used: .* without surrounding spaces"),
        (("folder/a/001.png", "bell\x07"), r"cannot be used"),
        (("folder/a/000.png", "b"), r"is 'b' here and 'a' in row 2: an image has one class"),
        (("./folder//a/000.png", "a"), r"came in row 2 already"),
        (("", "a"), r"row 4 names no file in the column 'file'"),
        (("folder/a/001.png",), r"row 4 has 1 fields, and the first row has 2"),
        (("folder/a/001.png", "a", "x"), r"row 4 has 3 fields"),
        (("x" * 5000, "a"), r"cannot be found: File name too long"),
    ],
)
def test_a_bad_row_refuses_the_table(
    tmp_path: Path, folder: Path, row: tuple[str, ...], reason: str
) -> None:
    table = written_csv(tmp_path / "photos.csv", [("file", "label"), *GOOD, row])
    with pytest.raises(DataRejected, match=reason) as refused:
        listed(table)
    assert "has 1 bad row, and nothing of it is read" in str(refused.value)
    assert "Correct these rows or take them out" in str(refused.value)
    assert str(refused.value).isprintable()


def test_all_bad_rows_are_counted_and_the_first_are_named(tmp_path: Path, folder: Path) -> None:
    rows = [(f"folder/{number}.png", "a") for number in range(25)]
    table = written_csv(tmp_path / "photos.csv", [("file", "label"), *GOOD, *rows])
    with pytest.raises(DataRejected, match=r"25 bad rows.*row 4 .*row 23 .* and 5 more") as refused:
        listed(table)
    assert "row 24" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("folder/a/000.png,a\n", r"has the columns 'folder/a/000.png', 'a'; it needs one for the"),
        ("file,etikett\nfolder/a/000.png,a\n", r"and one for the class \(label, class, category\)"),
        ("", r"has the columns none"),
        ("file,label\n", r"has no rows"),
        ('file,label\nfolder/a/000.png,"a\n', r"row 2 is not CSV: unexpected end of data"),
        ("file,label\nfolder/a/000.png," + "a" * 200_000 + "\n", r"row 2 is not CSV: field larger"),
    ],
)
def test_other_csv_is_refused_with_what_it_needs(
    tmp_path: Path, folder: Path, text: str, reason: str
) -> None:
    (tmp_path / "photos.csv").write_text(text)
    with pytest.raises(DataRejected, match=reason):
        listed(tmp_path / "photos.csv")


def test_a_table_that_is_not_utf_8_names_the_row(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "photos.csv").write_bytes(b"file,label\nfolder/a/000.png,caf\xe9\n")
    with pytest.raises(DataRejected, match="is not UTF-8 in row 2"):
        listed(tmp_path / "photos.csv")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"file": "folder/a/001.png", "label": ', r"row 2 is not JSON"),
        ("[" * 100_000, r"row 2 is not JSON"),
        ("[1]", r"row 2 is not an object of JSON"),
        ('{"file": 3, "label": "a"}', r"row 2 names no file in the column 'file'"),
        ('{"label": "a"}', r"row 2 names no file"),
        ('{"file": "folder/a/001.png"}', r"row 2 \(folder/a/001.png\) has no label"),
        ('{"file": "folder/a/001.png", "label": ["a"]}', r"has a label that is not text"),
        ('{"file": "folder/a/001.png", "label": null}', r"has no label"),
    ],
)
def test_a_bad_line_of_json_refuses_the_table(
    tmp_path: Path, folder: Path, line: str, reason: str
) -> None:
    table = jsonl(tmp_path / "photos.jsonl", [{"file": GOOD[0][0], "label": "a"}])
    table.write_text(table.read_text() + line + "\n")
    with pytest.raises(DataRejected, match=reason):
        listed(table)


def test_a_table_without_one_readable_line_says_what_is_wrong_with_the_first(
    tmp_path: Path,
) -> None:
    table = tmp_path / "photos.jsonl"
    table.write_text("file,label\na.png,a\n")
    with pytest.raises(DataRejected, match="no row that can be read: row 1 is not JSON"):
        listed(table)


def test_a_number_is_a_label_by_its_digits(tmp_path: Path, folder: Path) -> None:
    rows = [{"file": name, "label": 7} for name, _ in GOOD]
    assert listed(jsonl(tmp_path / "photos.jsonl", rows)).names == ("7",)


def test_an_image_with_two_categories_is_named(tmp_path: Path, folder: Path) -> None:
    labels = flattened(folder, tmp_path / "coco")
    document = coco_of(labels)
    document["annotations"] += [
        {"id": 90, "image_id": 2, "category_id": 2},
        {"id": 91, "image_id": 3, "category_id": 1},  # once more: two boxes of one class
        {"id": 92, "image_id": 4, "category_id": 9},
        {"id": 93, "image_id": 77, "category_id": 1},
    ]
    document["images"].append({"id": 50, "file_name": "unlabelled.png"})
    (tmp_path / "coco" / "c.json").write_text(json.dumps(document))
    with pytest.raises(DataRejected, match="4 bad rows") as refused:
        listed(tmp_path / "coco" / "c.json")
    for told in (
        "image 2 (a-001.png) is 'a' and 'b': an image has one class",
        "annotation 9 has a category that is not listed",
        "image 7 (unlabelled.png) has no label",
        "image id 77 is annotated, and is not listed",
    ):
        assert told in str(refused.value)


def test_labels_of_fiftyone_that_fit_no_file_or_class_are_named(
    tmp_path: Path, folder: Path
) -> None:
    flattened(folder, tmp_path / "f" / "data")
    (tmp_path / "f" / "data" / "a-000.jpg").write_bytes(b"the same name without its ending")
    labels = {"a-000": 0, "a-001": 9, "a-002": -1, "gone": 0, "b-000": None, "b-001": ["a", "b"]}
    document = {"classes": ["a", "b"], "labels": labels}
    (tmp_path / "f" / "labels.json").write_text(json.dumps(document))
    with pytest.raises(DataRejected, match="6 bad rows") as refused:
        listed(tmp_path / "f")
    for told in (
        "label 1 (a-000) is the name of several files: 'a-000.jpg', 'a-000.png'",
        "label 2 (a-001) has a label that is not among `classes`",
        "label 3 (a-002) has a label that is not among `classes`",
        "label 4 (gone) does not exist",
        "label 5 (b-000.png) has no label",
        "label 6 (b-001.png) is 'a' and 'b': an image has one class",
    ):
        assert told in str(refused.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "none of the JSON exports that are read"),
        ('{"images": 3, "annotations": [], "categories": []}', "is not as its kind of export is"),
        ('{"images": [{}], "annotations": [], "categories": []}', "KeyError: 'id'"),
        ('{"items": [], "categories": []}', "is not as its kind of export is"),
        ('{"classes": [], "labels": {}}', "has no rows"),
    ],
)
def test_other_json_is_refused_with_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "labels.json").write_text(text)
    with pytest.raises(DataRejected, match=reason):
        listed(tmp_path / "labels.json")
