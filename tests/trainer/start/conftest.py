"""A pre-trained file, a store to be, and letters that begin it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.machine import run_folder
from tests.trainer.folders import write_classes
from tests.trainer.start.pretrained_start import LETTERS, choose_quickly, first, run
from tests.trainer.vit import write_vit


@pytest.fixture(autouse=True)
def _chooses_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_quickly(monkeypatch)


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    return write_vit(tmp_path / "vit.safetensors")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    return write_classes(tmp_path / "letters", LETTERS)


@pytest.fixture(scope="session")
def begun_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return begin(tmp_path_factory, "begun")


@pytest.fixture(scope="session")
def begun_without_pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return begin(tmp_path_factory, "bare", memory="statistics")


@pytest.fixture
def begun(begun_once: Path, store: Path) -> Path:
    """A store whose version 1 is the file, and knows the letters."""
    return Path(shutil.copytree(begun_once, store))


def begin(tmp_path_factory: pytest.TempPathFactory, name: str, **others: object) -> Path:
    folder = tmp_path_factory.mktemp(name)
    data = write_classes(folder / "letters", LETTERS)
    with pytest.MonkeyPatch.context() as patch:
        choose_quickly(patch)
        patch.setenv("DNE_CACHE", str(run_folder(tmp_path_factory) / "cache"))
        run(first(folder / "models", data, write_vit(folder / "vit.safetensors"), **others))
    return folder / "models"
