"""Write items of the inbox as tasks with predictions, and find the item of a task."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from model_store.inbox.naming import is_id
from model_store.label_studio.label_config import CLASSES, IMAGE, Controls
from model_store.layout import ITEM_ID
from model_store.records.inbox import ItemRecord

ITEM = "dne_item"
SHA256 = "dne_sha256"
MAX_ADDRESS = 2000
MODEL = "dne-serve-"
IN_ADDRESS = re.compile(rf"(?<![0-9a-z]){ITEM_ID}(?![0-9a-z])")


def task_data(item: ItemRecord, *, image: str, classes: Sequence[str]) -> dict[str, Any]:
    """Write the data of a task. `image` is the address of the picture for a labeller's browser."""
    return {
        IMAGE: image,
        CLASSES: class_choices(classes),
        ITEM: item.id,
        SHA256: item.picture.sha256,
    }


def class_choices(classes: Sequence[str]) -> list[dict[str, str]]:
    return [{"value": name} for name in classes]


def item_of(data: object, *, image_key: str = IMAGE) -> str | None:
    """Return the item that a task is about: the one that its data names, or the one in the name of
    its image. Return None for the task of another picture. No address is followed."""
    if not isinstance(data, Mapping):
        return None
    named = data.get(ITEM)
    if isinstance(named, str) and is_id(named):
        return named
    address = data.get(image_key)
    if not isinstance(address, str) or len(address) > MAX_ADDRESS:
        return None
    found = IN_ADDRESS.findall(address)
    return found[-1] if found else None


def is_same_picture(data: object, item: ItemRecord) -> bool:
    """Tell whether a task is about the picture of the item, as far as its data has a digest."""
    digest = data.get(SHA256) if isinstance(data, Mapping) else None
    return digest is None or digest == item.picture.sha256


def model_version(version: int) -> str:
    """Name a version of the store as Label Studio's `model_version`."""
    return f"{MODEL}{version}"


def is_model_version(name: str) -> bool:
    return name.startswith(MODEL)


def prediction(controls: Controls, *, label: str, score: float, version: int) -> dict[str, Any]:
    """Write an answer as Label Studio's prediction. Tasks are sorted by its score."""
    region = {
        "from_name": controls.choices,
        "to_name": controls.image,
        "type": "choices",
        "value": {"choices": [label]},
        "score": score,
    }
    return {"result": [region], "score": score, "model_version": model_version(version)}


def kept_prediction(
    item: ItemRecord, controls: Controls, *, classes: Collection[str]
) -> dict[str, Any] | None:
    """Write the answer that was given when the picture was kept: the likeliest class that there
    still is. Return None where none of the likeliest is left."""
    for one in item.top:
        if one.label in classes and controls.offers(one.label):
            return prediction(controls, label=one.label, score=one.score, version=item.version)
    return None
