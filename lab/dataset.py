"""Read a data set from a zip file of `train/<class>/*.png` and `test/<class>/*.png`."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab import saved
from lab.results import Note
from model_store.errors import DataRejected, ImageRejected, WrongUsage
from model_store.preprocess import read_pixels
from model_store.records.manifest import Preprocessing
from trainer.data.folders import MAX_NAMED, LabelledImages, and_more

UNREADABLE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
"""Raised by `ZipFile.read`: wrong checksums, torn streams, encryption, unknown compression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Training and test images, labelled among the same classes in alphabetical order."""

    train: LabelledImages
    test: LabelledImages
    digest: str
    """SHA-256 of the file."""

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes


def read_dataset(
    path: Path, *, preprocessing: Preprocessing, kept: Path | None = None, note: Note = print
) -> Dataset:
    """Read all images. Name missing classes and damaged files.

    Keep the pixels in the folder `kept`, if given: decoding takes longer than a small task.
    """
    if not path.is_file():
        raise WrongUsage(f"--data {path} is not a file; it should be a zip of images")
    digest = _sha256(path)
    if kept is None:
        return _read_zip(path, preprocessing, digest=digest)
    pixels = kept / f"{digest[:16]}-{preprocessing.image_size}.safetensors"
    with saved.only_one(pixels, note=note):
        known = saved.read(pixels, note=note)
        if known is not None:
            return _recall(*known, digest=digest)
        data = _read_zip(path, preprocessing, digest=digest)
        _keep(pixels, data)
    return data


def _keep(path: Path, data: Dataset) -> None:
    parts = {"train": data.train, "test": data.test}
    tensors = {f"{name}.pixels": torch.from_numpy(one.pixels_NHWC) for name, one in parts.items()}
    tensors |= {f"{name}.labels": torch.from_numpy(one.labels_N) for name, one in parts.items()}
    saved.write(path, tensors, {"classes": data.classes})


def _recall(tensors: Mapping[str, Tensor], known: Mapping[str, Any], *, digest: str) -> Dataset:
    train, test = (
        LabelledImages(
            classes=tuple(known["classes"]),
            pixels_NHWC=tensors[f"{part}.pixels"].numpy(),
            labels_N=tensors[f"{part}.labels"].numpy(),
        )
        for part in ("train", "test")
    )
    return Dataset(train=train, test=test, digest=digest)


def _read_zip(path: Path, preprocessing: Preprocessing, *, digest: str) -> Dataset:
    try:
        with zipfile.ZipFile(path) as archive:
            files = _files(archive)
            _refuse_missing(files)
            train, test = (_read(archive, files[part], preprocessing) for part in ("train", "test"))
    except zipfile.BadZipFile as error:
        raise DataRejected(f"{path} is not a zip file, or is damaged: {error}") from error
    return Dataset(train=train, test=test, digest=digest)


def _files(archive: zipfile.ZipFile) -> dict[str, dict[str, list[str]]]:
    """List the files by part and class. Paths of another form are not images of the set."""
    found: dict[str, dict[str, list[str]]] = {"train": {}, "test": {}}
    for name in sorted(archive.namelist()):
        path = PurePosixPath(name)
        if len(path.parts) == 3 and path.parts[0] in found and path.suffix == ".png":
            found[path.parts[0]].setdefault(path.parts[1], []).append(name)
    return found


def _refuse_missing(files: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
    train, test = files["train"].keys(), files["test"].keys()
    if not train and not test:
        raise DataRejected("there are no files train/<class>/*.png and test/<class>/*.png")
    for part, missing in (("train", sorted(test - train)), ("test", sorted(train - test))):
        if missing:
            named = ", ".join(map(repr, missing[:MAX_NAMED])) + and_more(missing)
            raise DataRejected(f"the data set has no images in {part}/ of {named}")


def _read(
    archive: zipfile.ZipFile, files: Mapping[str, Sequence[str]], preprocessing: Preprocessing
) -> LabelledImages:
    classes = tuple(sorted(files))
    pixels, labels, bad = [], [], defaultdict(list)
    for label, name in enumerate(classes):
        for file in files[name]:
            try:
                pixels.append(read_pixels(archive.read(file), preprocessing))
                labels.append(label)
            except (ImageRejected, *UNREADABLE) as error:
                bad[str(error)].append(file)
    if bad:
        named = [f"{file} ({reason})" for reason, each in bad.items() for file in each]
        raise DataRejected(f"damaged images: {'; '.join(named[:MAX_NAMED])}{and_more(named)}")
    return LabelledImages(
        classes=classes, pixels_NHWC=np.stack(pixels), labels_N=np.array(labels, dtype=np.int64)
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
