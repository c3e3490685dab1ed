"""Read a data set from a zip file of `train/<class>/*` and `test/<class>/*`, or from a folder of it
that holds these."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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

SUFFIXES = (".png", ".jpg")
UNREADABLE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
"""Raised by `ZipFile.read`: wrong checksums, torn streams, encryption, unknown compression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Training and test images, labelled among the same classes in alphabetical order."""

    train: LabelledImages
    test: LabelledImages
    digest: str = ""
    """SHA-256 of the file."""
    archive: Path | None = None
    """The file; None for images that come from none."""

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes


def read_dataset(
    path: Path,
    *,
    preprocessing: Preprocessing,
    domain: str = "",
    kept: Path | None = None,
    note: Note = print,
) -> Dataset:
    """Read all images in the folder `domain` of the file. Name missing classes and damaged files.

    Keep the pixels in the folder `kept`, if given: decoding takes longer than a small task.
    """
    if not path.is_file():
        raise WrongUsage(f"--data {path} is not a file; it should be a zip of images")
    digest = _sha256(path)
    if kept is None:
        return replace(_read_zip(path, preprocessing, domain), digest=digest, archive=path)
    name = "-".join(filter(None, (digest[:16], domain, str(preprocessing.image_size))))
    pixels = kept / f"{name}.safetensors"
    with saved.only_one(pixels, note=note):
        known = saved.read(pixels, note=note)
        data = _recall(*known) if known is not None else _read_zip(path, preprocessing, domain)
        if known is None:
            _keep(pixels, data)
    return replace(data, digest=digest, archive=path)


def _keep(path: Path, data: Dataset) -> None:
    parts = {"train": data.train, "test": data.test}
    tensors = {f"{name}.pixels": torch.from_numpy(one.pixels_NHWC) for name, one in parts.items()}
    tensors |= {f"{name}.labels": torch.from_numpy(one.labels_N) for name, one in parts.items()}
    saved.write(path, tensors, {"classes": data.classes})


def _recall(tensors: Mapping[str, Tensor], known: Mapping[str, Any]) -> Dataset:
    train, test = (
        LabelledImages(
            classes=tuple(known["classes"]),
            pixels_NHWC=tensors[f"{part}.pixels"].numpy(),
            labels_N=tensors[f"{part}.labels"].numpy(),
        )
        for part in ("train", "test")
    )
    return Dataset(train=train, test=test)


def _read_zip(path: Path, preprocessing: Preprocessing, domain: str) -> Dataset:
    try:
        with zipfile.ZipFile(path) as archive:
            files = _files(archive, domain)
            _refuse_missing(files)
            train, test = (_read(archive, files[part], preprocessing) for part in ("train", "test"))
    except zipfile.BadZipFile as error:
        raise DataRejected(f"{path} is not a zip file, or is damaged: {error}") from error
    return Dataset(train=train, test=test)


def _files(archive: zipfile.ZipFile, domain: str) -> dict[str, dict[str, list[str]]]:
    """List the files by part and class. Paths of another form are not images of the set."""
    before = PurePosixPath(domain).parts
    found: dict[str, dict[str, list[str]]] = {"train": {}, "test": {}}
    for name in sorted(archive.namelist()):
        path = PurePosixPath(name)
        above, own = path.parts[: len(before)], path.parts[len(before) :]
        if above == before and len(own) == 3 and own[0] in found and path.suffix in SUFFIXES:
            found[own[0]].setdefault(own[1], []).append(name)
    return found


def _refuse_missing(files: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
    train, test = files["train"].keys(), files["test"].keys()
    if not train and not test:
        raise DataRejected("there are no images in folders train/<class> and test/<class>")
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
