"""Labelled pictures are sorted into class folders in one way, for people and for the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_store.errors import ItemNotFound, RecordInvalid
from model_store.loop.inbox import Inbox, Judgement
from model_store.loop.item_names import picture_name
from model_store.loop.items import LabelledItem, labelled_items, open_index
from model_store.loop.waiting import fill_class_folders
from model_store.store.store import Store
from tests.model_store.loop.items import add_item, picture_bytes


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    return Inbox(Store.create(str(tmp_path / "models")).objects)


def labelled(inbox: Inbox, label: str, count: int) -> list[LabelledItem]:
    for number in range(count):
        item = add_item(inbox, f"{label} {number}", minutes=number)
        inbox.judge(item, Judgement.of_class(label), actor="tests")
    return [item for item in labelled_items(inbox, open_index(inbox)) if item.label == label]


def replace_picture(inbox: Inbox, item: LabelledItem, data: bytes | None) -> None:
    inbox.objects.delete(picture_name(item.record))
    if data is not None:
        inbox.objects.create(picture_name(item.record), data)


def test_the_same_labels_are_the_same_folders_in_any_order(inbox: Inbox) -> None:
    mugs, cups = labelled(inbox, "mug", 3), labelled(inbox, "cup", 2)
    folders = fill_class_folders(inbox, {"mug": mugs, "cup": cups})
    backwards = fill_class_folders(inbox, {"cup": cups[::-1], "mug": mugs[::-1]})
    assert folders == backwards
    assert list(folders.classes) == list(backwards.classes) == ["cup", "mug"]
    assert folders.numbers == {item.record.id: 1 for item in (*mugs, *cups)}


def test_pictures_that_are_gone_or_damaged_are_left_out_and_then_classes_with_too_few(
    inbox: Inbox,
) -> None:
    mugs, cups = labelled(inbox, "mug", 4), labelled(inbox, "cup", 2)
    replace_picture(inbox, mugs[0], None)
    replace_picture(inbox, mugs[1], b"damaged")
    replace_picture(inbox, cups[0], None)
    folders = fill_class_folders(inbox, {"mug": mugs, "cup": cups}, fewest=2)
    left = sorted(item.record.id for item in mugs[2:])
    assert {name: [record.id for record in items] for name, items in folders.classes.items()} == {
        "mug": left
    }
    assert sorted(folders.numbers) == left


def test_only_errors_that_are_named_are_skipped(inbox: Inbox) -> None:
    mugs = labelled(inbox, "mug", 2)
    replace_picture(inbox, mugs[0], b"damaged")
    with pytest.raises(RecordInvalid, match="digest does not match"):
        fill_class_folders(inbox, {"mug": mugs}, skipping=(ItemNotFound,))


def test_each_picture_is_written_into_the_folder_of_its_class(inbox: Inbox) -> None:
    written: set[tuple[str, bytes]] = set()
    fill_class_folders(
        inbox,
        {"a": labelled(inbox, "mug", 2), "b": labelled(inbox, "cup", 1)},
        write=lambda name, record, picture: written.add((name, picture)),
    )
    assert written == {
        ("a", picture_bytes("mug 0")),
        ("a", picture_bytes("mug 1")),
        ("b", picture_bytes("cup 0")),
    }
