"""Parquet with image bytes, as Hugging Face's `datasets` writes it."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_store.errors import DataRejected, WrongUsage
from tests.trainer.data.sources.forms import files_of, listed, read, zipped
from tests.trainer.folders import write_classes

pyarrow = pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
parquet = pytest.importorskip("pyarrow.parquet")


def metadata(**features: dict[str, Any]) -> dict[bytes, bytes]:
    return {b"huggingface": json.dumps({"info": {"features": features}}).encode()}


def written(
    path: Path, folder: Path, *, text: bool = False, names: list[str] | None = None, **others: Any
) -> Path:
    """Write a folder as `datasets` does: struct<bytes, path>, and numbers with names."""
    files = files_of(folder)
    classes = sorted({file.parent.name for file in files}) if names is None else names
    labels = [one.parent.name if text else classes.index(one.parent.name) for one in files]
    columns = {
        "image": [{"bytes": file.read_bytes(), "path": file.name} for file in files],
        "label": labels,
        **others,
    }
    table = pyarrow.table(columns)
    if not text:
        label = {"names": classes, "_type": "ClassLabel"}
        table = table.replace_schema_metadata(metadata(image={"_type": "Image"}, label=label))
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(table, path, row_group_size=2)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_classes(tmp_path / "folder", ["zebra", "ant"], images=3)


@pytest.mark.parametrize("text", [False, True])
def test_parquet_gives_the_pixels_and_labels_of_the_folder(
    tmp_path: Path, folder: Path, text: bool
) -> None:
    expected, found = (
        read(listed(folder)),
        read(listed(written(tmp_path / "p.parquet", folder, text=text))),
    )
    assert found.classes == expected.classes
    np.testing.assert_array_equal(found.labels_N, expected.labels_N)
    np.testing.assert_array_equal(found.pixels_NHWC, expected.pixels_NHWC)


@pytest.mark.parametrize("packed", [False, True])
def test_files_of_a_dataset_are_parts_and_shards(
    tmp_path: Path, folder: Path, packed: bool
) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        (tmp_path / "set" / "data").mkdir(parents=True, exist_ok=True)
        written(tmp_path / "set" / "data" / f"{name}.parquet", folder)
    (tmp_path / "set" / "README.md").write_text("# A dataset")
    data = tmp_path / "set"
    listing = listed(zipped(data, tmp_path / "set.zip") if packed else data)
    assert listing.judge is not None
    assert (listing.images, listing.judge.images) == (12, 6)
    assert len(read(listing)) == 12


def test_bad_rows_are_named_and_nothing_is_read(tmp_path: Path) -> None:
    image = {"bytes": b"x", "path": None}
    columns = {
        "image": [image, image, {"bytes": None, "path": "a.png"}, image, image],
        "label": [0, None, 0, 5, 1],
    }
    label = {"names": ["a", "b/c"], "_type": "ClassLabel"}
    table = pyarrow.table(columns).replace_schema_metadata(metadata(label=label))
    parquet.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(DataRejected, match="4 bad rows") as refused:
        listed(tmp_path / "p.parquet")
    for told in (
        "row 2 of p.parquet has no label",
        "row 3 of p.parquet has no bytes of an image",
        "row 4 of p.parquet has the label 5, and there are 2 names",
        "row 5 of p.parquet has a label that cannot be used",
    ):
        assert told in str(refused.value)


def test_numbers_without_names_are_refused_with_the_way_out(tmp_path: Path) -> None:
    table = pyarrow.table({"image": [{"bytes": b"x", "path": ""}], "label": [3]})
    parquet.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(DataRejected, match="no names for numbers: write labels as text"):
        listed(tmp_path / "p.parquet")


def test_columns_are_found_by_their_kind_if_there_is_one_of_it(tmp_path: Path) -> None:
    columns = {"photo": [{"bytes": b"x", "path": ""}], "fine": [0], "coarse": [0]}
    kind = {"names": ["a"], "_type": "ClassLabel"}
    one = metadata(photo={"_type": "Image"}, fine=kind, coarse={"dtype": "int64", "_type": "Value"})
    two = metadata(photo={"_type": "Image"}, fine=kind, coarse=kind)
    parquet.write_table(pyarrow.table(columns).replace_schema_metadata(one), tmp_path / "1.parquet")
    assert listed(tmp_path / "1.parquet").names == ("a",)
    parquet.write_table(pyarrow.table(columns).replace_schema_metadata(two), tmp_path / "2.parquet")
    with pytest.raises(DataRejected, match="columns 'photo', 'fine', 'coarse'; it needs one of im"):
        listed(tmp_path / "2.parquet")


def test_bad_images_are_named_by_file_and_row(tmp_path: Path, folder: Path) -> None:
    (folder / "ant" / "001.png").write_bytes(b"broken")
    listing = listed(written(tmp_path / "p.parquet", folder))
    with pytest.raises(DataRejected, match=r"cannot be read: p\.parquet: row 2 \(not an image"):
        read(listing)


def test_damaged_parquet_is_refused_everywhere(tmp_path: Path, folder: Path) -> None:
    whole = written(tmp_path / "p.parquet", folder).read_bytes()
    for place in range(4, len(whole), len(whole) // 60):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        (tmp_path / "p.parquet").write_bytes(damaged)
        try:
            read(listed(tmp_path / "p.parquet"))
        except DataRejected:
            continue
    (tmp_path / "p.parquet").write_bytes(whole[:-20])
    with pytest.raises(DataRejected, match="is not parquet that can be read"):
        listed(tmp_path / "p.parquet")


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "p.parquet", folder)
    real = builtins.__import__

    def without(name: str, *others: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *others)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(WrongUsage, match=r"pip install 'dne-serve\[parquet\]'"):
        listed(path)
