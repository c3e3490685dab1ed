"""Begin a store with a pre-trained file, and add tasks to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_store.codec import load_network
from model_store.network.network import Network
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.trainer.folders import Listening, asked
from trainer.add_task import add_task
from trainer.request import AddTask, Effort, NetworkShape, PretrainedFile
from trainer.versions.outcome import Outcome

EFFORT = Effort(epochs=2, batch_size=10)


LETTERS = ["a", "b", "c"]


def choose_quickly(patch: pytest.MonkeyPatch) -> None:
    """Choosing a penalty takes most of the time of so small a task; test_classifier tries all."""
    patch.setattr("trainer.fitting.choice.L2_PENALTIES", (0.1, 0.01))
    patch.setattr("trainer.fitting.choice.FOLDS", 2)


def first(store: Path, data: Path, vit: Path, **others: object) -> AddTask:
    names = [name for name in others if name in PretrainedFile.__slots__]
    chosen = {"file": vit, **{name: others.pop(name) for name in names}}
    options = {"shape": NetworkShape(), "effort": EFFORT, **others}
    return asked(store, data, pretrained=PretrainedFile(**chosen), **options)  # type: ignore[arg-type]


def later(store: Path, data: Path, **others: object) -> AddTask:
    return asked(store, data, **{"shape": NetworkShape(), "effort": EFFORT, **others})


def run(request: AddTask, *, progress: Listening | None = None) -> Outcome:
    return add_task(request, progress=progress or Listening())


def network_of(store: Path, manifest: Manifest) -> Network:
    return load_network(Store.open(str(store)).read_shard, manifest)
