"""Read tokens of CIFAR-100 through a given vision transformer, as `add-task` does, and keep them.

A small first task makes a store with the backbone as its first expert. All images pass through it
once: a second run finds their tokens in the cache.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from model_store.codec import load_network
from model_store.inference.forward import Lineage
from model_store.preprocess import read_pixels
from model_store.records.manifest import Manifest
from model_store.store.cache import tokens_folder
from model_store.store.store import Store
from trainer.data.folders import LabelledImages
from trainer.embeddings.cache import EmbeddingCache
from trainer.progress import show_progress

TRAIN = (sys.executable, "-c", "import sys; from trainer.cli import main; sys.exit(main())")
FIRST_CLASSES, FIRST_IMAGES = 2, 10
"""The small task that makes the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Tokens of training and test images, of the classes in this order."""

    classes: tuple[str, ...]
    train_NW: NDArray[np.float32]
    train_N: NDArray[np.int64]
    test_NW: NDArray[np.float32]
    test_N: NDArray[np.int64]


def read_cifar(
    cifar: Path, *, pretrained: Path, classes: int, train: int, test: int, seed: int
) -> Read:
    """Read so many images a class, of classes that the seed draws."""
    with zipfile.ZipFile(cifar) as archive, TemporaryDirectory() as folder:
        files = sorted(archive.namelist())
        every = sorted({name.split("/")[1] for name in files})
        drawn = np.random.default_rng(seed).permutation(len(every))[:classes]
        names = tuple(every[place] for place in sorted(drawn))
        store, manifest = _first_task(archive, names, Path(folder), pretrained)
        network = load_network(store.read_shard, manifest)
        cache = EmbeddingCache(
            network,
            Lineage.of(network).token,
            preprocessing=manifest.preprocessing,
            folder=tokens_folder(str(Path(folder) / "models")),
        )

        def tokens(part: str, count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
            images = _images(archive, part, names, count, manifest)
            with show_progress().phase(f"reading embeddings: {part}", total=len(images)) as phase:
                found = cache.embeddings(images, advance=phase.advance)
            cache.save()
            return found[:, : network.spec.slice_width(0)], images.labels_N

        train_NW, train_N = tokens("train", train)
        test_NW, test_N = tokens("test", test)
    return Read(classes=names, train_NW=train_NW, train_N=train_N, test_NW=test_NW, test_N=test_N)


def _first_task(
    archive: zipfile.ZipFile, names: tuple[str, ...], folder: Path, pretrained: Path
) -> tuple[Store, Manifest]:
    for name in names[:FIRST_CLASSES]:
        (folder / "data" / name).mkdir(parents=True)
        for number, file in enumerate(_files(archive, "train", name, FIRST_IMAGES)):
            (folder / "data" / name / f"{number}.png").write_bytes(archive.read(file))
    options = ["--data", folder / "data", "--pretrained", pretrained, "--normalise", "half"]
    where = ["--store", folder / "models"]
    command = [*TRAIN, "add-task", *map(str, [*options, *where])]
    subprocess.run(command, check=True, stdout=sys.stderr)
    store = Store.open(str(folder / "models"))
    return store, store.manifest(1)


def _files(archive: zipfile.ZipFile, part: str, name: str, count: int) -> list[str]:
    return [one for one in sorted(archive.namelist()) if one.startswith(f"{part}/{name}/")][:count]


def _images(
    archive: zipfile.ZipFile, part: str, names: tuple[str, ...], count: int, manifest: Manifest
) -> LabelledImages:
    files = [
        (place, file)
        for place, name in enumerate(names)
        for file in _files(archive, part, name, count)
    ]
    pixels = np.stack(
        [read_pixels(archive.read(file), manifest.preprocessing) for _, file in files]
    )
    return LabelledImages(
        classes=names, pixels_NHWC=pixels, labels_N=np.array([place for place, _ in files])
    )
