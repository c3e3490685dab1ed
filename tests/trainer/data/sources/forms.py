"""The same images in all the forms that people have."""

from __future__ import annotations

import csv
import json
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from model_store.records.manifest import Preprocessing
from tests.trainer.folders import SIZE, Listening
from trainer.data.folders import LabelledImages, Listing, read_images
from trainer.data.sources.forms import list_data
from trainer.request import AddTask

PREPROCESSING = Preprocessing(image_size=SIZE)


def listed(data: Path, **others: object) -> Listing:
    request: dict[str, Any] = {"store": str(data.parent / "models"), "data": data, **others}
    return list_data(AddTask(**request))


def read(listing: Listing) -> LabelledImages:
    return read_images(listing, preprocessing=PREPROCESSING, skip_bad=False, progress=Listening())


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def zipped(folder: Path, path: Path, *, inside: str = "") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files_of(folder):
            archive.write(file, inside + str(file.relative_to(folder)))
    return path


def tarred(folder: Path, path: Path, *, inside: str = "./") -> Path:
    mode: Any = {".gz": "w:gz", ".bz2": "w:bz2"}.get(path.suffix, "w")
    with tarfile.open(path, mode) as archive:
        archive.add(folder, arcname=inside)
    return path


def csv_of(folder: Path, path: Path, *, header: str = "file,label") -> Path:
    rows = [(str(file.relative_to(path.parent)), file.parent.name) for file in files_of(folder)]
    return written_csv(path, [header.split(","), *rows])


def written_csv(path: Path, rows: Iterable[Iterable[str]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def flattened(folder: Path, into: Path) -> dict[str, str]:
    """Copy all images side by side, and return the class of each name."""
    into.mkdir(parents=True)
    labels = {}
    for file in files_of(folder):
        name = f"{file.parent.name}-{file.name}"
        (into / name).write_bytes(file.read_bytes())
        labels[name] = file.parent.name
    return labels


def coco_of(labels: Mapping[str, str]) -> dict[str, Any]:
    names = sorted(set(labels.values()))
    return {
        "images": [
            {"id": number, "file_name": name, "width": SIZE, "height": SIZE}
            for number, name in enumerate(labels, start=1)
        ],
        "annotations": [
            {"id": number, "image_id": number, "category_id": names.index(label) + 1}
            for number, label in enumerate(labels.values(), start=1)
        ],
        "categories": [{"id": n, "name": name} for n, name in enumerate(names, start=1)],
    }
