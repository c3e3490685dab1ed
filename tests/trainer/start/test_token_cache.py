"""Tokens are kept by digest: no image passes through the same experts twice."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from model_store.inference.forward import Lineage
from tests.trainer.folders import Listening, write_classes
from tests.trainer.start.pretrained_start import first, later, run
from tests.trainer.vit import SLICE
from trainer.base import base_of
from trainer.data.folders import list_classes, read_images
from trainer.data.pictures import Pixels, StoredImage
from trainer.embeddings import cache as token_cache
from trainer.learning.token_reading import cache_of, reduced_tokens_of
from trainer.start.make_student import make_student


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The images of each batch that passed through the experts."""
    seen: list[int] = []
    token = Lineage.token

    def count(self: Lineage, images_BCHW: Tensor, **others: object) -> Tensor:
        if images_BCHW.abs().sum() > 0:  # not the empty image of a measurement
            seen.append(len(images_BCHW))
        return token(self, images_BCHW, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(Lineage, "token", count)
    return seen


@pytest.fixture(autouse=True)
def _in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.versions.assess.agreement_of", lambda *_, **__: {})


@pytest.fixture
def unsampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe a sealed file without a sample."""
    monkeypatch.setattr(token_cache.EmbeddingCache, "_prove", lambda *_: None)


@pytest.mark.usefixtures("unsampled")
def test_each_image_passes_once_whatever_reads_it(
    tmp_path: Path, letters: Path, digits: Path, vit: Path, passed: list[int]
) -> None:
    store, tokens = tmp_path / "models", tmp_path / "tokens"
    run(first(store, letters, vit, readout="narrow", tokens=tokens))
    assert sum(passed) == 3 * 12
    run(later(store, digits, tokens=tokens))
    assert sum(passed) == 5 * 12
    assert len(list(tokens.iterdir())) == 1
    other = run(first(tmp_path / "other", letters, vit, readout="narrow", tokens=tokens)).manifest
    assert sum(passed) == 5 * 12
    assert other.metrics.accuracy.all == 1.0


def test_a_second_run_proves_a_few_tokens_of_each_file_and_no_more(
    tmp_path: Path, letters: Path, vit: Path, passed: list[int]
) -> None:
    tokens = tmp_path / "tokens"
    for name in ("one", "other"):
        passed.clear()
        run(first(tmp_path / name, letters, vit, readout="auto", tokens=tokens))
    assert 4 <= sum(passed) <= 8


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the images of the store that were decoded."""
    seen: list[int] = []
    decode = StoredImage.decode

    def count(self: StoredImage) -> Pixels:
        seen.append(len(self.data))
        return decode(self)

    monkeypatch.setattr(StoredImage, "decode", count)
    return seen


@pytest.mark.usefixtures("unsampled")
def test_images_of_the_store_are_not_decoded_where_their_tokens_are_known(
    tmp_path: Path, letters: Path, digits: Path, vit: Path, decoded: list[int]
) -> None:
    store, tokens = tmp_path / "models", tmp_path / "tokens"
    run(first(store, letters, vit, readout="narrow", tokens=tokens))
    shutil.copytree(store, tmp_path / "same")
    known = run(later(store, digits, tokens=tokens)).manifest
    assert not decoded
    anew = run(later(tmp_path / "same", digits, tokens=tmp_path / "others")).manifest
    assert len(decoded) == 3 * 12
    assert anew.metrics.accuracy == known.metrics.accuracy


def test_the_bar_moves_with_every_batch(tmp_path: Path, letters: Path, vit: Path) -> None:
    request = first(tmp_path / "models", letters, vit, readout="narrow")
    listing, progress = list_classes(letters), Listening()
    student = make_student(base_of(request), request=request, new=listing, progress=progress)
    images = read_images(
        listing, preprocessing=student.preprocessing, skip_bad=False, progress=progress
    )
    cache = cache_of(student, student.lineage(), folder=None)
    moves: list[int] = []
    cache.embeddings(images.take(np.arange(8)), advance=moves.append)
    cache.embeddings(images, advance=moves.append)
    assert moves == [8, 8, 16, 12]  # a batch; those that are known, and two batches


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, letters: Path, vit: Path, passed: list[int]
) -> None:
    run(first(tmp_path / "models", letters, vit, readout="narrow"))
    assert sum(passed) == 30 + 6  # the classifier and the exemplars share them; held-out ones
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[: len(data) // 2], id="cut-off"),
        pytest.param(lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:], id="one-bit"),
    ],
)
def test_a_damaged_file_costs_time_and_nothing_else(
    tmp_path: Path, letters: Path, vit: Path, passed: list[int], damage: object
) -> None:
    tokens = tmp_path / "tokens"
    whole = run(first(tmp_path / "one", letters, vit, readout="narrow", tokens=tokens)).manifest
    (path,) = tokens.iterdir()
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    again = run(first(tmp_path / "two", letters, vit, readout="narrow", tokens=tokens)).manifest
    assert sum(passed) == 2 * 36
    assert again.shards == whole.shards


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(
    tmp_path: Path, letters: Path, vit: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a file")
    assert run(first(tmp_path / "models", letters, vit, readout="narrow", tokens=tokens)).promoted


def test_the_files_of_other_experts_make_room(
    tmp_path: Path, letters: Path, vit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    (tokens / "old.tokens").write_bytes(bytes(5000))
    monkeypatch.setattr(token_cache, "MAX_BYTES", 43_000)
    run(first(tmp_path / "models", letters, vit, readout="narrow", tokens=tokens))
    assert "old.tokens" not in {path.name for path in tokens.iterdir()}
    assert len(list(tokens.iterdir())) == 1


def test_a_file_has_a_bound_and_keeps_the_newest(
    tmp_path: Path, letters: Path, vit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "MAX_FILE_BYTES", 20 * (32 + 4 * SLICE + 1))
    tokens = tmp_path / "tokens"
    run(first(tmp_path / "models", letters, vit, readout="narrow", tokens=tokens))
    (path,) = tokens.iterdir()
    assert path.stat().st_size < 20 * (32 + 4 * SLICE) + 300


def test_pictures_are_not_kept(tmp_path: Path, letters: Path, vit: Path) -> None:
    tokens = tmp_path / "tokens"
    run(first(tmp_path / "models", letters, vit, readout="narrow", tokens=tokens))
    (path,) = tokens.iterdir()
    kept = token_cache._read(path, width=SLICE)
    known = kept.embeddings if kept else {}
    assert len(known) == 2 * 36  # by pixels, and by the files in the store
    assert all(one.shape == (SLICE,) and np.isfinite(one).all() for one in known.values())


def test_names_do_not_matter_and_pixels_do(
    tmp_path: Path, letters: Path, vit: Path, passed: list[int]
) -> None:
    tokens = tmp_path / "tokens"
    run(first(tmp_path / "one", letters, vit, readout="narrow", tokens=tokens))
    others = write_classes(tmp_path / "others", ["a", "b", "c"], seed=3)
    run(first(tmp_path / "two", others, vit, readout="narrow", tokens=tokens))
    assert sum(passed) == 2 * 36


def test_tokens_in_a_reduced_precision_are_kept_apart(
    tmp_path: Path, letters: Path, vit: Path
) -> None:
    request = first(tmp_path / "models", letters, vit, readout="narrow")
    listing, progress = list_classes(letters), Listening()
    student = make_student(base_of(request), request=request, new=listing, progress=progress)
    images = read_images(
        listing, preprocessing=student.preprocessing, skip_bad=False, progress=progress
    )
    made: list[int] = []

    def make() -> Callable[[Tensor], Tensor]:
        made.append(1)
        return lambda images_BCHW: torch.full((len(images_BCHW), SLICE), float(len(made)))

    read = reduced_tokens_of(student, folder=tmp_path / "tokens", progress=Listening())
    assert (read("int8", make, images) == 1).all()
    assert (read("int8", make, images) == 1).all()  # known, so nothing is made
    assert (read("bf16", make, images) == 2).all()
    assert len(made) == 2


def test_the_same_weights_in_another_shape_have_tokens_of_their_own(
    tmp_path: Path, letters: Path, vit: Path, passed: list[int]
) -> None:
    tokens = tmp_path / "tokens"
    for heads in (1, 2):
        run(
            first(
                tmp_path / str(heads),
                letters,
                vit,
                readout="narrow",
                attention_heads=heads,
                tokens=tokens,
            )
        )
    assert sum(passed) == 2 * 36
    assert len(list(tokens.iterdir())) == 2
