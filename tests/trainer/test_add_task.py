"""From a folder to a version: what is learnt, and what is left as it was."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from model_store.codec import load_network
from model_store.errors import DataRejected, DneError, Interrupted, WrongUsage
from model_store.maintenance.forget import forget_class
from model_store.network.expert import Expert
from model_store.preprocess import read_pixels
from model_store.records.manifest import ClassImages, delta_of, total_bytes
from model_store.store.shard import decode_images
from model_store.store.store import Store
from tests.trainer.folders import SHAPE, Listening, asked, learn, write_classes
from trainer.base import base_of
from trainer.data.folders import list_classes
from trainer.data.task_data import read_task_data
from trainer.learning.learn import learn as learn_task
from trainer.learning.learn import plan_of
from trainer.request import Effort, NetworkShape
from trainer.start.make_student import make_student

LATER = NetworkShape()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    return write_classes(tmp_path / "digits", ["0", "1", "2"])


def test_the_first_task_makes_version_1_and_promotes_it(store: Path, letters: Path) -> None:
    outcome = learn(asked(store, letters, reason="to begin"))
    opened = Store.open(str(store))
    manifest, head = opened.manifest(1), opened.head("production")
    assert opened.versions() == [1]
    assert head is not None
    assert (head.target, head.mode, head.actor, head.reason) == (1, "follow", "tests", "to begin")
    assert (manifest.parent, manifest.tasks[0].name) == (None, "letters")
    assert manifest.spec.classes == ("a", "b")
    assert manifest.metrics.source == "held-out"
    assert manifest.metrics.images == 4
    assert not opened.verify().problems
    assert outcome.promoted
    assert outcome.refused is None


def test_the_phases_of_a_run_are_expected_with_all_their_images(
    store: Path, letters: Path, digits: Path
) -> None:
    """Else the time left of the whole run would be wrong."""
    first, second = Listening(), Listening()
    learn(asked(store, letters), progress=first)
    learn(asked(store, digits, shape=LATER, loss="binary"), progress=second)
    assert [one.name for one in first.expected] == ["learning", "choosing exemplars", "judging"]
    assert [one.name for one in second.expected][1] == "balancing"
    for progress in (first, second):
        assert {
            one.name: one.images for one in progress.expected
        }.items() <= progress.totals.items()
        assert [
            name for name in progress.phases if name in {one.name for one in progress.expected}
        ] == [one.name for one in progress.expected]


def test_the_answer_is_the_one_the_design_promises(
    store: Path, letters: Path, digits: Path
) -> None:
    learn(asked(store, letters))
    outcome = learn(asked(store, digits, shape=LATER))
    facts, manifest = outcome.as_json(), outcome.manifest
    assert set(facts) == {
        *("version", "parent", "tasks", "classes", "new_classes", "accuracy", "promoted"),
        *("refused", "delta_bytes", "total_bytes", "memory_bytes", "seconds"),
        *("calibration", "unknown", "gate"),
        *(
            "extended",
            "corrected",
            "forecast",
            "judged",
            "verdict",
            "notes",
            "deepened",
            "adapted",
            "deeper",
        ),
        *("advice", "served"),
    }
    assert (facts["version"], facts["parent"]) == (2, 1)
    assert (facts["tasks"], facts["classes"], facts["new_classes"]) == (2, 5, ["0", "1", "2"])
    assert set(facts["accuracy"]) == {"all", "old", "new", "parent_old"}
    assert None not in facts["accuracy"].values()
    assert facts["delta_bytes"] == manifest.experts[1].bytes + manifest.classifier.bytes
    assert facts["total_bytes"] == facts["delta_bytes"] + manifest.experts[0].bytes
    assert facts["memory_bytes"] == total_bytes(manifest.image_shards)
    assert facts["seconds"] > 0


def test_old_experts_keep_their_shards_for_ever(
    store: Path, letters: Path, digits: Path, tmp_path: Path
) -> None:
    learn(asked(store, letters))
    learn(asked(store, digits, shape=LATER, effort=Effort(epochs=2, learning_rate=0.01)))
    learn(asked(store, write_classes(tmp_path / "signs", ["+"]), shape=NetworkShape(heads=2)))
    one, two, three = (Store.open(str(store)).manifest(number) for number in (1, 2, 3))
    assert one.tasks == two.tasks[:1]
    assert two.tasks == three.tasks[:2]
    assert {ref.kind for ref in delta_of(three, two)} == {"expert", "classifier"}
    assert len(delta_of(three, two)) == 2


def test_learning_leaves_old_experts_bit_for_bit_as_they_were(
    store: Path, letters: Path, digits: Path
) -> None:
    parent = learn(asked(store, letters)).manifest
    request = asked(store, digits, shape=LATER, effort=Effort(epochs=3, learning_rate=0.01))
    base, listing = base_of(request), list_classes(digits)
    student = make_student(base, request=request, new=listing, progress=Listening())
    data = read_task_data(
        listing,
        base=base,
        request=request,
        classes=student.network.spec.classes,
        preprocessing=student.preprocessing,
        progress=Listening(),
    )
    plan = plan_of(student, images=data.for_training, request=request)
    learn_task(student, data=data, plan=plan, request=request, progress=Listening())
    published = load_network(base.read_shard, parent).experts[0].state_dict()
    for name, value in student.network.experts[0].state_dict().items():
        assert torch.equal(value, published[name]), name


def test_two_tasks_plan_join_and_fold_no_more_often_than_they_need(
    store: Path, letters: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()

    def count(place: str) -> None:
        module, _, name = place.rpartition(".")
        original = getattr(importlib.import_module(module), name)

        def counting(*args: object, **kwargs: object) -> object:
            counts[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(place, counting)

    count("trainer.learning.learn.make_plan")
    count("trainer.data.task_data.join")
    count("trainer.learning.student.fold_expert")
    learn(asked(store, letters, checkpoint=store / "../kept"))
    # Images for training, for judging, and to hold out; the expert before and after learning.
    assert counts == {"make_plan": 1, "join": 3, "fold_expert": 2}
    learn(asked(store, digits, shape=LATER, checkpoint=store / "../kept"))
    # The older expert is folded once, for the forecast, for learning and for judging.
    assert counts == {"make_plan": 2, "join": 6, "fold_expert": 5}


def test_old_experts_take_part_in_folded_form_alone(
    store: Path, letters: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(asked(store, letters))
    plain = Expert.embed
    ran: list[Expert] = []

    def embed(expert: Expert, images: torch.Tensor) -> torch.Tensor:
        ran.append(expert)
        return plain(expert, images)

    monkeypatch.setattr(Expert, "embed", embed)
    learn(asked(store, digits, shape=LATER))
    assert ran
    assert all(expert is ran[0] for expert in ran), "an expert besides the newest ran"


def test_learning_teaches_without_forgetting(store: Path, letters: Path, digits: Path) -> None:
    effort = Effort(epochs=60, batch_size=16, learning_rate=3e-3)
    first = learn(asked(store, letters, effort=effort, augment="none"))
    assert first.manifest.metrics.accuracy.all == 1.0
    second = learn(asked(store, digits, shape=LATER, effort=effort, augment="none"))
    accuracy = second.manifest.metrics.accuracy
    assert accuracy.parent_old == 1.0
    assert (accuracy.old, accuracy.new) == (1.0, 1.0)


@pytest.mark.parametrize("augment", [pytest.param("standard", marks=pytest.mark.long), "light"])
def test_the_same_seed_gives_the_same_shards(
    tmp_path: Path, letters: Path, digits: Path, augment: str
) -> None:
    def shards(store: Path, *, seed: int) -> list[str]:
        options = {"augment": augment, "seed": seed}
        learn(asked(store, letters, **options))
        manifest = learn(asked(store, digits, shape=LATER, **options)).manifest
        return [ref.sha256 for ref in manifest.shards]

    first = shards(tmp_path / "one", seed=7)
    assert shards(tmp_path / "two", seed=7) == first
    assert shards(tmp_path / "three", seed=8)[:2] != first[:2]


@pytest.mark.parametrize("phase", ["reading images", "learning", "balancing"])
def test_an_interrupted_run_publishes_nothing_and_says_so(
    store: Path, letters: Path, digits: Path, phase: str
) -> None:
    learn(asked(store, letters))
    request = asked(store, digits, shape=LATER, loss="binary")
    with pytest.raises(Interrupted, match=r"^interrupted: nothing was published$"):
        learn(request, progress=Listening(interrupt_in=phase))
    opened = Store.open(str(store))
    assert opened.versions() == [1]
    assert not opened.verify().problems


def test_a_run_that_diverges_publishes_nothing(store: Path, letters: Path) -> None:
    with pytest.raises(DneError, match="nothing was published"):
        learn(asked(store, letters, effort=Effort(epochs=5, learning_rate=1e30)))
    assert not store.exists()


def test_a_known_class_and_a_known_task_are_refused(
    store: Path, letters: Path, digits: Path, tmp_path: Path
) -> None:
    learn(asked(store, letters))
    with pytest.raises(DataRejected, match="knows 'b' already"):
        learn(asked(store, write_classes(tmp_path / "more", ["b", "c"]), shape=LATER))
    with pytest.raises(WrongUsage, match="a task named 'letters' already"):
        learn(asked(store, digits, shape=LATER, name="letters"))
    assert Store.open(str(store)).versions() == [1]


def test_the_first_task_has_fixed_the_sizes(store: Path, letters: Path, digits: Path) -> None:
    learn(asked(store, letters))
    with pytest.raises(WrongUsage, match="fixed image_size 8"):
        learn(asked(store, digits, shape=NetworkShape(preset="tiny")))
    assert learn(asked(store, digits, shape=SHAPE)).manifest.version == 2


def test_validation_images_judge_instead_of_held_out_ones(
    store: Path, letters: Path, digits: Path, tmp_path: Path
) -> None:
    learn(asked(store, letters))
    chosen = write_classes(tmp_path / "val", ["a", "2"], images=3)
    metrics = learn(asked(store, digits, shape=LATER, val_data=chosen)).manifest.metrics
    assert (metrics.source, metrics.images, set(metrics.per_class)) == ("validation", 6, {"a", "2"})
    foreign = write_classes(tmp_path / "foreign", ["zebra"], images=3)
    signs = write_classes(tmp_path / "signs", ["+"])
    with pytest.raises(WrongUsage, match=r"`val_data=.*'zebra', which the model does not know"):
        learn(asked(store, signs, shape=LATER, val_data=foreign))


def test_bad_validation_images_are_skipped_like_others(
    store: Path, letters: Path, tmp_path: Path
) -> None:
    val = write_classes(tmp_path / "val", ["a"], images=3)
    (val / "a" / "001.png").write_bytes(b"broken")
    with pytest.raises(DataRejected, match=r"001\.png"):
        learn(asked(store, letters, val_data=val))
    assert learn(asked(store, letters, val_data=val, skip_bad=True)).manifest.metrics.images == 2


def test_classes_of_a_few_images_are_learnt_and_not_judged(store: Path, tmp_path: Path) -> None:
    outcome = learn(asked(store, write_classes(tmp_path / "few", ["a", "b"], images=2)))
    assert outcome.manifest.held_out == ()
    assert outcome.manifest.metrics.source == "none"
    assert outcome.as_json()["accuracy"]["all"] is None


def test_a_published_version_loads_and_answers(store: Path, letters: Path) -> None:
    manifest = learn(asked(store, letters)).manifest
    network = load_network(Store.open(str(store)).read_shard, manifest)
    assert network.spec == manifest.spec
    weights = np.concatenate([one.detach().numpy().ravel() for one in network.parameters()])
    assert np.isfinite(weights).all()


def test_on_a_pinned_channel_a_version_is_published_and_not_promoted(
    store: Path, letters: Path, digits: Path, tmp_path: Path
) -> None:
    learn(asked(store, letters))
    learn(asked(store, digits, shape=LATER))
    opened = Store.open(str(store))
    opened.rollback(channel="production", to=1, actor="tests", reason="")
    outcome = learn(asked(store, write_classes(tmp_path / "signs", ["+"]), shape=LATER))
    assert (outcome.manifest.version, outcome.manifest.parent) == (3, 1)
    assert outcome.manifest.spec.classes == ("a", "b", "+")
    assert not outcome.promoted
    assert outcome.refused is not None
    assert "pinned to version 1" in outcome.refused
    assert "dne-store promote 3 --channel production" in outcome.refused
    head = opened.head("production")
    assert head is not None
    assert head.target == 1


class MovesTheChannel(Listening):
    """Someone else's version is promoted while this one is being learnt."""

    def __init__(self, store: Path) -> None:
        super().__init__()
        self._store = store

    def note(self, text: str) -> None:
        super().note(text)
        if text.startswith("learning "):
            Store.open(str(self._store)).promote(
                1, channel="production", actor="someone else", reason="meanwhile"
            )


def test_when_the_channel_has_moved_the_version_stays_a_branch(
    store: Path, letters: Path, digits: Path
) -> None:
    learn(asked(store, letters))
    outcome = learn(asked(store, digits, shape=LATER), progress=MovesTheChannel(store))
    assert Store.open(str(store)).versions() == [1, 2]
    assert not outcome.promoted
    assert outcome.refused is not None
    assert "version 2 is a branch" in outcome.refused
    assert "starts from the new head" in outcome.refused
    head = Store.open(str(store)).head("production")
    assert head is not None
    assert head.target == 1


def test_not_promoting_is_no_refusal_where_it_was_asked(store: Path, letters: Path) -> None:
    outcome = learn(asked(store, letters, promote=False))
    assert (outcome.promoted, outcome.refused) == (False, None)
    opened = Store.open(str(store))
    assert opened.versions() == [1]
    assert opened.head("production") is None


def test_a_channel_that_names_nothing_is_not_built_on(
    store: Path, letters: Path, digits: Path
) -> None:
    learn(asked(store, letters))
    with pytest.raises(WrongUsage, match=r"dne-store promote 1 --channel canary"):
        learn(asked(store, digits, shape=LATER, channel="canary"))


def test_a_run_announces_what_it_builds_on_until_it_ends(
    store: Path, letters: Path, digits: Path
) -> None:
    learn(asked(store, letters))
    opened = Store.open(str(store))
    seen: list[int] = []

    class Watching(Listening):
        def note(self, text: str) -> None:
            seen.append(len(opened.objects.list("runs")))

    learn(asked(store, digits, shape=LATER), progress=Watching())
    assert max(seen) == 1
    assert not opened.objects.list("runs")
    with pytest.raises(Interrupted):
        learn(
            asked(store, write_classes(store.parent / "more", ["x", "y"]), shape=LATER),
            progress=Listening(interrupt_in="learning"),
        )
    assert not opened.objects.list("runs")


def pixels_kept(store: Path, entries: tuple[ClassImages, ...]) -> list[bytes]:
    opened = Store.open(str(store))
    preprocessing = opened.manifest(1).preprocessing
    return [
        read_pixels(image, preprocessing).tobytes()
        for entry in entries
        for image in decode_images(opened.read_shard(entry.shard), count=entry.count)
    ]


def test_held_out_images_are_kept_and_never_among_the_exemplars(store: Path, letters: Path) -> None:
    manifest = learn(asked(store, letters)).manifest
    held_out = pixels_kept(store, manifest.held_out)
    memory = pixels_kept(store, manifest.memory)
    assert (len(held_out), len(memory)) == (4, 20)
    assert not set(held_out) & set(memory)


def test_the_memory_of_old_classes_shrinks_by_count_and_its_shards_stay(
    store: Path, letters: Path, digits: Path
) -> None:
    one = learn(asked(store, letters, memory=10)).manifest
    two = learn(asked(store, digits, shape=LATER, memory=10)).manifest
    assert [entry.count for entry in one.memory] == [5, 5]
    assert [entry.count for entry in two.memory] == [2, 2, 2, 2, 2]
    assert [entry.shard for entry in two.memory[:2]] == [entry.shard for entry in one.memory]
    assert two.held_out[:2] == one.held_out
    before = pixels_kept(store, one.memory)
    assert pixels_kept(store, two.memory[:2]) == [*before[:2], *before[5:7]]


def test_a_memory_of_none_keeps_no_exemplars_and_still_learns(
    store: Path, letters: Path, digits: Path
) -> None:
    assert learn(asked(store, letters, memory=0)).manifest.memory == ()
    progress = Listening()
    request = asked(store, digits, shape=LATER, memory=0, loss="binary")
    second = learn(request, progress=progress)
    assert second.manifest.memory == ()
    assert "balancing" not in progress.phases


@pytest.mark.parametrize(
    ("loss", "last"), [("cross-entropy", "choosing exemplars"), ("binary", "balancing")]
)
def test_old_classes_are_balanced_in_the_loss_or_after_it(
    store: Path, letters: Path, digits: Path, loss: str, last: str
) -> None:
    first, second = Listening(), Listening()
    learn(asked(store, letters, loss=loss), progress=first)
    assert first.phases[:3] == ["reading images", "learning", "choosing exemplars"]
    learn(asked(store, digits, shape=LATER, loss=loss), progress=second)
    assert second.phases[:3] == ["reading images", "learning", last]


def test_a_class_whose_pictures_were_forgotten_does_not_stop_the_next_task(
    store: Path, letters: Path, digits: Path
) -> None:
    learn(asked(store, letters))
    opened = Store.open(str(store))
    forget_class(opened, "a", actor="tests", reason="asked to")
    learn(asked(store, digits, shape=LATER))
    child = opened.manifest(2)
    assert "a" in child.spec.classes
    assert "a" not in {entry.class_name for entry in (*child.memory, *child.held_out)}
    assert not opened.verify().problems
