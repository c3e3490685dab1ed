"""Options of a store that begins with a pre-trained file, and files that do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from model_store.errors import DataRejected, WrongUsage
from tests.trainer.start.pretrained_start import (
    first,
    later,
    run,
)
from tests.trainer.vit import made_up, write_vit
from trainer.progress import Silent
from trainer.request import AddTask, NetworkShape, PretrainedFile
from trainer.start.first_network import normalisation_named, refuse_pretrained, start_of

HALF, IMAGENET = (0.5, 0.5, 0.5), (0.485, 0.456, 0.406)


@pytest.mark.parametrize("readout", ["narrow", "wide"])
def test_the_forecast_is_what_the_version_then_has(
    store: Path, letters: Path, digits: Path, vit: Path, readout: str
) -> None:
    for request in (first(store, letters, vit, readout=readout), later(store, digits)):
        outcome = run(request)
        assert outcome.forecast is not None
        assert outcome.forecast.version.bytes == outcome.as_json()["total_bytes"]
        assert outcome.forecast.delta_bytes == outcome.as_json()["delta_bytes"]


def test_the_forecast_is_an_upper_bound_while_the_readout_is_open(
    store: Path, letters: Path, vit: Path
) -> None:
    outcome = run(first(store, letters, vit))
    assert outcome.forecast is not None
    assert outcome.forecast.version.bytes >= outcome.as_json()["total_bytes"]


@pytest.mark.parametrize(
    ("given", "mean", "std"),
    [
        ("half", HALF, HALF),
        ("imagenet", IMAGENET, (0.229, 0.224, 0.225)),
        ("0.1,0.2,0.3/1,2,3", (0.1, 0.2, 0.3), (1.0, 2.0, 3.0)),
    ],
)
def test_the_normalisation_goes_into_the_version(
    store: Path,
    letters: Path,
    vit: Path,
    given: str,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> None:
    preprocessing = run(first(store, letters, vit, normalise=given)).manifest.preprocessing
    assert (preprocessing.mean, preprocessing.std) == (mean, std)


def test_the_normalisation_is_that_of_the_family_unless_said(
    store: Path, letters: Path, tmp_path: Path
) -> None:
    scaled = write_vit(tmp_path / "scaled", made_up(layer_scale=True))
    assert run(first(store, letters, scaled)).manifest.preprocessing.mean == IMAGENET


@pytest.mark.parametrize(
    "given", ["", "quarter", "1,2,3", "1,2/3,4", "1,1,1/1,0,1", "1,1,1/1,1,inf"]
)
def test_a_normalisation_that_makes_no_sense_is_wrong_usage(given: str) -> None:
    with pytest.raises(WrongUsage, match="`normalise="):
        normalisation_named(given)


def test_another_image_size_is_fine_and_stays(store: Path, letters: Path, vit: Path) -> None:
    manifest = run(first(store, letters, vit, shape=NetworkShape(image_size=12))).manifest
    assert manifest.spec.patches == 9
    assert manifest.preprocessing.image_size == 12
    assert np.isfinite(manifest.metrics.accuracy.all or np.nan)


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ({"shape": NetworkShape(preset="tiny")}, "`preset=tiny` does not go with `pretrained`"),
        (
            {"shape": NetworkShape(depth=5)},
            "`depth=5` does not fit: the pre-trained file has fixed it",
        ),
        ({"shape": NetworkShape(patch_size=8)}, "`patch_size=8` does not fit"),
        ({"shape": NetworkShape(head_width=16)}, "`head_width=16` does not fit"),
        ({"shape": NetworkShape(heads=1)}, "`heads=1` does not fit"),
        ({"shape": NetworkShape(image_size=10)}, "cannot be cut into patches of 4"),
        ({"unfreeze_last": 3}, "`unfreeze_last=3`: .* has 2 blocks"),
        ({"normalise": "mine"}, "`normalise='mine'` is neither"),
        ({"attention_heads": 7}, "`attention_heads=7`"),
        ({"extend": True}, "`extend` needs a version to extend"),
    ],
)
def test_what_contradicts_the_file_is_wrong_usage(
    store: Path, letters: Path, vit: Path, others: dict[str, object], sentence: str
) -> None:
    with pytest.raises(WrongUsage, match=sentence):
        run(first(store, letters, vit, **others))
    assert not store.exists()


def test_sizes_that_agree_with_the_file_may_be_said(store: Path, letters: Path, vit: Path) -> None:
    said = NetworkShape(image_size=8, patch_size=4, depth=2, head_width=32, heads=2)
    assert run(first(store, letters, vit, shape=said)).manifest.version == 1


def test_a_file_that_is_something_else_publishes_nothing(
    store: Path, tmp_path: Path, letters: Path
) -> None:
    odd = write_vit(tmp_path / "odd.safetensors", {"weight": torch.zeros(3)})
    with pytest.raises(DataRejected, match=r"odd.safetensors is not a vision transformer"):
        run(first(store, letters, odd))
    assert not store.exists()


class Notes(Silent):
    """Keeps what the user is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)


def told_at_start(images: int, **others: object) -> list[str]:
    request = AddTask(data=Path("photos"), store="models", **others)  # type: ignore[arg-type]
    notes = Notes()
    start_of(request, images=images, classes=6, progress=notes)
    return notes.told


def test_few_photos_without_a_pre_trained_start_are_told_what_to_expect() -> None:
    [told] = told_at_start(240)
    assert "240 photos of 6 classes usually end below 60 %" in told
    assert "--pretrained dinov2-small" in told
    assert told_at_start(240, from_scratch=True) == []
    assert told_at_start(240, shape=NetworkShape(preset="tiny")) == []
    assert told_at_start(1800) == []


def test_a_start_from_scratch_is_for_a_first_task_without_weights(vit: Path) -> None:
    with pytest.raises(WrongUsage, match="`from_scratch` begins without weights"):
        told_at_start(240, from_scratch=True, pretrained=PretrainedFile(file=vit))
    with pytest.raises(WrongUsage, match="`from_scratch` is for the first task of a store"):
        refuse_pretrained(AddTask(data=Path("photos"), store="models", from_scratch=True))
