"""Label configs are read without expanding anything."""

from __future__ import annotations

import pytest

from model_store.errors import LabelConfigInvalid
from model_store.loop.label_studio import (
    LABEL_CONFIG,
    MAX_CHARACTERS,
    Controls,
    item_of,
    read_label_config,
)

ITEM = "20261117t120000000-0123456789ab"


def test_our_own_config_takes_its_classes_from_the_task() -> None:
    found = read_label_config(LABEL_CONFIG)
    assert found == Controls(choices="class", image="image", image_key="image", fixed=None)
    assert found.offers("anything")


def test_the_first_choices_for_an_image_count() -> None:
    found = read_label_config(
        '<View><Text name="t" value="$text"/><Choices name="mood" toName="t" value="$moods"/>'
        '<Image name="photo" value="$url"/><Choices name="kind" toName="t, photo">'
        '<Choice value="cat"/><Choice value="dog"><Choice value="poodle"/></Choice></Choices>'
        '<Choices name="more" toName="photo"><Choice value="zebra"/></Choices></View>'
    )
    assert (found.choices, found.image, found.image_key) == ("kind", "photo", "url")
    assert found.fixed == {"cat", "dog", "poodle"}


@pytest.mark.parametrize(
    "config",
    [
        '<!DOCTYPE v [<!ENTITY x "y">]>' + LABEL_CONFIG,
        '<!DOCTYPE v [<!ENTITY % x SYSTEM "file:///etc/passwd"> %x;]>' + LABEL_CONFIG,
        '<?xml version="1.0" encoding="utf-7"?><View>&unknown;</View>',
        "\ud800",
        "<View>\0</View>",
        LABEL_CONFIG + " " * MAX_CHARACTERS,
    ],
)
def test_hostile_configs_are_refused(config: str) -> None:
    with pytest.raises(LabelConfigInvalid):
        read_label_config(config)


@pytest.mark.parametrize(
    "data",
    [
        {"dne_item": ITEM, "image": "https://example.org/other.png"},
        {"image": f"/data/upload/1/1234abcd-{ITEM}.png"},
        {"image": f"https://dne.example.org/inbox/{ITEM}/image"},
    ],
)
def test_an_item_is_found_by_its_id(data: object) -> None:
    assert item_of(data) == ITEM


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {"image": ["a"]},
        {"dne_item": 5},
        {"dne_item": f"{ITEM}/../x"},
        {"image": f"{ITEM}0"},
        {"image": f"x{ITEM}"},
        {"image": ITEM + "x" * 3000},
    ],
)
def test_anything_else_is_no_item(data: object) -> None:
    assert item_of(data) is None
