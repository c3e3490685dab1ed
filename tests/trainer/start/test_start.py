"""Tasks on top of a pre-trained first expert."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from model_store.errors import Interrupted, WrongUsage
from model_store.records.manifest import Manifest, delta_of
from model_store.store.store import Store
from tests.machine import run_folder
from tests.trainer.folders import Listening, write_classes
from tests.trainer.start.pretrained_start import (
    choose_quickly,
    first,
    later,
    network_of,
    run,
)
from tests.trainer.vit import SLICE, made_up, slice_of
from trainer.request import Effort


def test_the_first_expert_is_the_file_and_only_the_classifier_is_fitted(
    store: Path, letters: Path, vit: Path
) -> None:
    progress = Listening()
    manifest = run(first(store, letters, vit), progress=progress).manifest
    network = network_of(store, manifest)
    images = torch.randn(2, 3, 8, 8)
    expected = slice_of(made_up(), images, heads=2)
    assert (network.token_slices(images)[0] - expected).abs().max() < 1e-4
    assert progress.phases[:3] == ["reading images", "reading embeddings", "fitting the classifier"]
    assert not {"learning", "balancing", "extending"} & set(progress.phases)
    assert progress.losses == []
    assert manifest.metrics.accuracy.all == 1.0
    assert manifest.spec.token == "in-sequence"
    assert (manifest.tasks[0].heads, manifest.tasks[0].training["epochs"]) == (2, 0)
    assert any("only the classifier is fitted" in note for note in progress.notes)


def test_the_record_says_where_the_weights_come_from(store: Path, letters: Path, vit: Path) -> None:
    training = run(first(store, letters, vit, unfreeze_last=1)).manifest.tasks[0].training
    assert len(str(training["pretrained"])) == 64
    assert training["unfrozen_blocks"] == 1
    assert training["epochs"] == 2
    assert isinstance(training["strength"], float)


@pytest.mark.long
def test_the_same_command_gives_the_same_bits(
    tmp_path: Path, letters: Path, digits: Path, vit: Path
) -> None:
    shards = []
    for name in ("one", "two"):
        run(first(tmp_path / name, letters, vit))
        shards.append(run(later(tmp_path / name, digits)).manifest.shards)
    assert shards[0] == shards[1]


@pytest.mark.parametrize("unfrozen", [1, 2])
def test_unfrozen_blocks_change_and_nothing_before_them(
    store: Path, begun_once: Path, letters: Path, vit: Path, unfrozen: int
) -> None:
    progress = Listening()
    request = first(
        store, letters, vit, unfreeze_last=unfrozen, effort=Effort(epochs=2, learning_rate=0.01)
    )
    manifest = run(request, progress=progress).manifest
    after = network_of(store, manifest).newest.state_dict()
    frozen = Store.open(str(begun_once)).manifest(1)
    before = network_of(begun_once, frozen).newest.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    blocks = tuple(f"blocks.{index}." for index in range(2 - unfrozen, 2))
    assert changed == {name for name in before if name.startswith((*blocks, "norm."))}
    assert progress.losses


def test_what_came_from_a_file_learns_at_a_tenth_of_the_rate(
    store: Path, letters: Path, vit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that is unfrozen, and nothing else: the heads are new."""
    seen: list[dict[float, int]] = []

    def look(self: torch.optim.AdamW, *args: object, **kwargs: object) -> None:
        rates: dict[float, int] = {}
        for group in self.param_groups:
            rates[group["lr"]] = rates.get(group["lr"], 0) + len(group["params"])
        seen.append(rates)

    monkeypatch.setattr(torch.optim.AdamW, "step", look)
    manifest = run(first(store, letters, vit, unfreeze_last=1)).manifest
    network = network_of(store, manifest)
    block, norm = len(list(network.newest.blocks[1].parameters())), 2
    slow, fast = sorted(seen[0])
    assert slow == pytest.approx(fast / 10)
    assert seen[0] == {slow: block + norm, fast: len(list(network.heads.parameters()))}


def test_a_later_task_adds_a_classifier_and_nothing_else(begun: Path, digits: Path) -> None:
    parent = Store.open(str(begun)).manifest(1)
    progress = Listening()
    outcome = run(later(begun, digits), progress=progress)
    child = outcome.manifest
    assert outcome.promoted
    assert outcome.deeper is None
    assert [ref.kind for ref in delta_of(child, parent)] == ["classifier", "doubt"]
    assert child.tasks[0] == parent.tasks[0]
    assert [task.heads for task in child.tasks] == [2, 0]
    assert child.new_classes == ("0", "1")
    assert child.preprocessing == parent.preprocessing
    assert progress.phases[:3] == ["reading images", "reading embeddings", "fitting the classifier"]
    assert not {"learning", "balancing", "extending"} & set(progress.phases)
    assert [one.name for one in progress.expected] == ["reading embeddings", "judging"]
    assert {one.name: one.images for one in progress.expected}.items() <= progress.totals.items()
    assert child.metrics.accuracy.all == 1.0


@pytest.mark.long
def test_an_epoch_of_a_later_task_stops_growing_with_what_was_learnt_before(
    store: Path, tmp_path: Path, letters: Path, vit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.learning.growing.LONGEST_EPOCH", 60)
    run(first(store, write_classes(tmp_path / "many", [f"m{i}" for i in range(8)]), vit))
    progress = Listening()
    effort = Effort(epochs=1, batch_size=10)
    run(later(store, letters, quick=False, effort=effort), progress=progress)
    assert len(progress.losses) == 6  # of 30 new images and 80 exemplars


@pytest.mark.long
def test_classes_stay_known_when_later_ones_come(begun: Path, tmp_path: Path) -> None:
    outcome = None
    for index in range(3):
        data = write_classes(tmp_path / f"t{index}", [f"x{index}", f"y{index}"])
        outcome = run(later(begun, data))
    assert outcome is not None
    assert outcome.manifest.metrics.accuracy.all == 1.0
    assert outcome.manifest.metrics.images == 18


@pytest.mark.long
def test_an_extension_fits_the_classifier_and_no_expert_changes(
    begun: Path, tmp_path: Path, digits: Path
) -> None:
    parent = run(later(begun, digits)).manifest
    progress = Listening()
    more = write_classes(tmp_path / "more", ["b", "new"], images=30) / "new"
    for image in more.iterdir():
        image.unlink()
    more.rmdir()
    child = run(later(begun, tmp_path / "more", extend=True), progress=progress).manifest
    assert child.extended == ("b",)
    assert child.tasks == parent.tasks
    assert [ref.kind for ref in delta_of(child, parent)] == ["classifier", "doubt"]
    assert "reading embeddings" in progress.phases
    assert "extending" not in progress.phases


def test_without_exemplars_a_later_task_is_learnt_from_statistics(
    store: Path, letters: Path, digits: Path, vit: Path
) -> None:
    run(first(store, letters, vit, memory=0))
    progress = Listening()
    manifest = run(later(store, digits, memory=0, quick=True), progress=progress).manifest
    assert manifest.version == 2
    assert manifest.tasks[-1].expert is None
    assert progress.phases[:3] == ["reading images", "reading embeddings", "fitting the classifier"]
    assert not {"learning", "balancing", "extending"} & set(progress.phases)
    assert manifest.metrics.accuracy.all == 1.0


@pytest.mark.long
def test_an_expert_is_read_where_a_class_has_no_image_left(
    store: Path, letters: Path, digits: Path, vit: Path
) -> None:
    run(first(store, letters, vit, memory=0))
    outcome = run(later(store, digits, memory=0, quick=False))
    assert outcome.deeper is not None
    network = network_of(store, outcome.deeper.manifest)
    assert all(head.get_parameter("weight")[:, SLICE:].any() for head in network.heads)
    assert outcome.deeper.manifest.statistics == outcome.manifest.statistics


IN_SMALL_BATCHES = Effort(epochs=2, batch_size=5)
IMAGES_A_PART = "trainer.learning.token_reading.IMAGES_A_PART"


@pytest.fixture(scope="module")
def uninterrupted(begun_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """The version with an expert of a run that nothing stops."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    data = write_classes(folder / "digits", ["0", "1"])
    shutil.copytree(begun_once, folder / "models")
    with pytest.MonkeyPatch.context() as patch:
        choose_quickly(patch)
        patch.setenv("DNE_CACHE", str(run_folder(tmp_path_factory) / "cache"))
        patch.setattr(IMAGES_A_PART, 16)
        request = later(folder / "models", data, quick=False, effort=IN_SMALL_BATCHES)
        deeper = run(request).deeper
        assert deeper is not None
        return deeper.manifest


@pytest.mark.long
def test_an_interrupted_run_goes_on_to_the_same_bits(
    tmp_path: Path,
    begun: Path,
    digits: Path,
    uninterrupted: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(IMAGES_A_PART, 16)
    request = later(
        begun, digits, quick=False, checkpoint=tmp_path / "kept", effort=IN_SMALL_BATCHES
    )
    with pytest.raises(Interrupted, match="goes on after epoch 1 of learning"):
        run(request, progress=Listening(interrupt_in="learning", after=11))
    head = Store.open(str(begun)).head("production")
    assert head is not None
    assert head.target == 2  # the quick one serves meanwhile
    assert run(request).manifest.shards == uninterrupted.shards
    assert Store.open(str(begun)).versions() == [1, 2, 3]
    assert not (tmp_path / "kept").exists()


@pytest.mark.long
def test_an_interrupted_first_task_goes_on_with_the_tokens_it_has(
    tmp_path: Path, letters: Path, vit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IMAGES_A_PART, 8)
    request = first(tmp_path / "one", letters, vit, checkpoint=tmp_path / "kept")
    with pytest.raises(Interrupted, match="part 1 of reading embeddings"):
        run(request, progress=Listening(interrupt_in="reading embeddings", after=2))
    continued = run(request).manifest
    assert continued.shards == run(first(tmp_path / "two", letters, vit)).manifest.shards


def test_a_store_that_has_versions_takes_no_pre_trained_file(
    begun: Path, digits: Path, vit: Path
) -> None:
    for extend in (False, True):
        with pytest.raises(WrongUsage, match="`pretrained` is for the first task of a store"):
            run(first(begun, digits, vit, extend=extend))
    assert Store.open(str(begun)).versions() == [1]
