"""Every form of data stops a file that would unpack to far more than it is."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from model_store.errors import DataRejected
from tests.trainer.data.sources.bomb_reader import read_in_child
from tests.trainer.data.sources.bombs import BOMBS, parquet_of_one_value
from tests.trainer.data.sources.forms import listed, read
from tests.trainer.folders import write_classes
from trainer.data.hierarchy import read_parents
from trainer.data.sources import limits

pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")

RATIO, LISTS, MANY = "200 times its size", "as a decompression bomb does", "more than 2,000"
HEADERS, ROW, MEMORY = "headers of more than", "a row has more than", "of memory"
SAYS = {
    "zip of zeros": RATIO,
    "zip of entries": MANY,
    "tar of zeros": RATIO,
    "tar of folders": MANY,
    "tar of deep folders": LISTS,
    "tar of links": MANY,
    "tar of empty files": MANY,
    "tar of a long name": HEADERS,
    "tar of pax headers": HEADERS,
    "tar of chained headers": "a chain of headers",
    "tar of a sparse file": HEADERS,
    "parquet of one value": RATIO,
    "parquet of large values": RATIO,
    "parquet of a page": "a page unpacks to",
    "parquet of rows": LISTS,
    "CSV of fields": ROW,
    "CSV of one row": ROW,
    "CSV of rows": MANY,
    "JSONL of lists": MEMORY,
    "JSONL of lines": MANY,
    "COCO of objects": MEMORY,
    "FiftyOne of depth": "nested more than 100 deep",
    "YAML of merges": "is not a name and the name of its group",
}
SMALL = {
    "FREE_BYTES": 1 << 20,
    "MAX_MEMBERS": 2000,
    "MAX_PAGE_BYTES": 1 << 20,
    "MAX_ROW_BYTES": 1 << 14,
    "MAX_HEADER_BYTES": 1 << 14,
    "MAX_MEMORY": 1 << 20,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_of_each_kind_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The limits are smaller here by a factor of 256, and so are the bombs."""
    bomb = BOMBS[name](tmp_path, 8 << 20)
    for limit, value in SMALL.items():
        monkeypatch.setattr(limits, limit, value)
    if name == "tar of chained headers":
        monkeypatch.undo()  # the library's own limit stops it
    tracemalloc.start()
    try:
        with pytest.raises(DataRejected, match=SAYS[name]):
            (read_parents if bomb.suffix == ".yaml" else listed)(bomb)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_rows_that_share_one_image_are_not_copied_to_the_disk_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FREE_BYTES", 1 << 20)
    written: list[int] = []
    monkeypatch.setattr(
        "trainer.data.sources.limits.StoredBytes.append",
        lambda self, data: written.append(len(data)),
    )
    with pytest.raises(DataRejected, match=RATIO):
        listed(parquet_of_one_value(tmp_path, 64 << 20))
    assert sum(written) <= 1 << 20


def test_many_files_beside_the_class_folders_take_no_time(tmp_path: Path) -> None:
    folder = write_classes(tmp_path / "photos", ["a", "b"], images=1)
    for number in range(3000):
        (folder / f"note-{number}.txt").touch()

    class Compared(type(folder)):  # type: ignore[misc]
        count = 0

        def __eq__(self, other: object) -> bool:
            Compared.count += 1
            return bool(super().__eq__(other))

        __hash__ = type(folder).__hash__

    assert listed(Compared(folder)).images == 2
    assert Compared.count < 10_000


def test_a_huge_file_in_a_folder_is_an_unreadable_image(tmp_path: Path) -> None:
    folder = write_classes(tmp_path / "photos", ["a"], images=1)
    with (folder / "a" / "huge.png").open("wb") as file:
        file.truncate(limits.MAX_FILE_BYTES + 1)
    with pytest.raises(DataRejected, match=r"huge\.png \(128\.0 MiB; at most 128\.0 MiB"):
        read(listed(folder))


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["parquet of one value", "tar of folders", "COCO of objects"])
def test_a_bomb_at_the_real_limits_takes_little_memory_and_disk(tmp_path: Path, name: str) -> None:
    found = read_in_child(BOMBS[name](tmp_path, 1 << 29))
    assert found.error
    assert "cannot be unpacked" not in found.error  # which a full disk would say
    assert found.grown_bytes < limits.MAX_MEMORY
