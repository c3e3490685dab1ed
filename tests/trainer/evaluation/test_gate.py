from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks.learning import gate as simulation
from model_store.errors import WrongUsage
from model_store.records.hierarchy import Hierarchy
from model_store.store.store import Store
from tests.trainer.folders import Listening, asked, write_classes
from trainer.add_task import add_task
from trainer.embeddings.cache import Floats
from trainer.evaluation.gate import (
    GateInput,
    at_least,
    chance_of_a_fall,
    decide,
    no_better_than_guessing,
    sign_flip_test,
    sign_test,
)
from trainer.evaluation.judged import Judged
from trainer.learning.learn import learn
from trainer.learning.student import Learnt
from trainer.request import Effort, GateLimits, NetworkShape
from trainer.versions.outcome import Outcome

OLD, NEW = ("a", "b"), ("c", "d")


def answers(labels: list[int], guesses: list[int], *, classes: int = 4) -> Judged:
    return Judged(
        classes=(*OLD, *NEW),
        labels_N=np.array(labels, dtype=np.int64),
        logits_NC=np.eye(classes, dtype=np.float32)[guesses].reshape(len(guesses), classes),
    )


def candidate(labels: list[int], *, before: list[int], after: list[int]) -> GateInput:
    """The parent's answers are about old classes only."""
    return GateInput(
        judged=answers(labels, after),
        parent=answers(labels, before, classes=2),
        older=OLD,
        newest=NEW,
        model_bytes=1000,
    )


def test_the_tests_of_chance_against_plain_counts() -> None:
    assert at_least(2, of=3, chance=0.5) == pytest.approx(0.5)
    assert at_least(0, of=0, chance=0.5) == 1
    assert at_least(1, of=2, chance=0.2) == pytest.approx(1 - 0.64)
    assert at_least(1600, of=3000, chance=0.5) == pytest.approx(1.4e-4, rel=0.1)
    assert sign_test(worse=5, better=0) == pytest.approx(1 / 32)


def test_a_large_fall_on_old_classes_is_refused_with_what_got_worse() -> None:
    gate = decide(
        candidate([0] * 6 + [1] * 4, before=[0] * 6 + [1] * 4, after=[2] * 6 + [1] * 4),
        limits=GateLimits(),
    )
    assert not gate.passed
    assert "fell from 100.0 % to 40.0 %" in gate.reasons[0]
    assert (gate.old_images, gate.got_worse, gate.got_better) == (10, 6, 0)
    assert [(one.class_name, one.before, one.images) for one in gate.worse] == [("a", 1.0, 6)]
    assert [(one.class_name, one.taken_for, one.count) for one in gate.confused] == [("a", "c", 6)]
    flip = gate.flipped[0]
    assert (flip.class_name, flip.before, flip.after, flip.count) == ("a", "a", "c", 6)


def test_images_that_got_worse_inside_their_group_are_told_and_refused_all_the_same() -> None:
    case = candidate([0] * 8 + [1] * 2, before=[0] * 8 + [1] * 2, after=[2] * 6 + [3] * 2 + [1] * 2)
    groups = Hierarchy(parents={"a": "vowels", "c": "vowels", "b": "others", "d": "others"})
    gate = decide(replace(case, hierarchy=groups), limits=GateLimits())
    assert (
        gate.notes[-1]
        == "8 images of old classes got worse, 6 of them inside a group of their class"
    )
    assert gate.reasons == decide(case, limits=GateLimits()).reasons
    same = candidate([0, 1], before=[0, 1], after=[0, 1])
    assert "group" not in str(decide(replace(same, hierarchy=groups), limits=GateLimits()).notes)


def test_a_handful_of_images_is_noise() -> None:
    for flips, passed in ((4, True), (5, True), (6, False)):
        case = candidate([0] * flips, before=[0] * flips, after=[2] * flips)
        gate = decide(case, limits=GateLimits())
        assert gate.passed is passed
        assert gate.p_value == pytest.approx(1 / 2**flips / 0.8, abs=0.02)


def test_the_sign_flip_test_is_what_all_signs_together_give() -> None:
    draw = np.random.default_rng(1)
    for count in (4, 9):
        falls = draw.normal(0.3, 1, size=count)
        sums = [sum(falls * signs) for signs in product((-1, 1), repeat=count)]
        exact = float(np.mean([one >= sum(falls) - 1e-9 for one in sums]))
        assert sign_flip_test(falls) == pytest.approx(exact, abs=0.02)
    assert sign_flip_test(np.zeros(5)) == 1


def test_a_fall_of_certainty_refuses_where_flips_alone_would_not() -> None:
    """Twelve answers go far wrong, and six wrong ones come right by a hair."""
    labels, before, after = np.zeros(200, dtype=np.int64), np.zeros((200, 2)), np.zeros((200, 4))
    before[:, 0] = after[:, 0] = 6
    after[:12, 2] = 12
    before[12:18, 0], before[12:18, 1] = 2.9, 3.1
    after[12:18, 0], after[12:18, 1] = 3.1, 2.9
    case = GateInput(
        judged=Judged(classes=(*OLD, *NEW), labels_N=labels, logits_NC=after.astype(np.float32)),
        parent=Judged(classes=OLD, labels_N=labels, logits_NC=before.astype(np.float32)),
        older=OLD,
        newest=NEW,
        model_bytes=1000,
    )
    gate = decide(case, limits=GateLimits())
    assert (gate.got_worse, gate.got_better) == (12, 6)
    assert sign_test(worse=12, better=6) > 0.1
    assert gate.p_value is not None
    assert gate.p_value < 0.01
    assert not gate.passed


def test_more_classes_alone_are_no_fall() -> None:
    """The probability of every answer falls, because there are more classes to choose among."""
    labels = np.zeros(60, dtype=np.int64)
    two = np.tile(np.array([1.0, 0.0], dtype=np.float32), (60, 1))
    two[:6] = two[:6, ::-1]
    four = np.pad(two, ((0, 0), (0, 2)))
    before = Judged(classes=OLD, labels_N=labels, logits_NC=two)
    assert chance_of_a_fall(before, replace(before, logits_NC=four)) > 0.05


@pytest.mark.parametrize(("kind", "bounds"), [("none", (0, 0.15)), ("swallowed", (0.7, 1))])
def test_five_points_are_noticed_and_none_are_not_called_a_fall(
    kind: str, bounds: tuple[float, float]
) -> None:
    fall = 0.0 if kind == "none" else 0.05
    found = simulation.share(simulation.refused, images=200, kind=kind, fall=fall, runs=40)
    assert bounds[0] <= found <= bounds[1]


def test_flips_to_the_good_weigh_against_flips_to_the_bad() -> None:
    before, after = [0] * 8 + [1] * 12, [1] * 8 + [0] * 5 + [1] * 7
    gate = decide(candidate([0] * 20, before=before, after=after), limits=GateLimits())
    assert (gate.got_worse, gate.got_better) == (8, 5)
    assert gate.passed


def test_the_drop_that_is_allowed_is_the_users_choice() -> None:
    case = candidate([0] * 24, before=[0] * 24, after=[1] * 6 + [0] * 18)
    assert not decide(case, limits=GateLimits(max_drop=0.24)).passed
    assert decide(case, limits=GateLimits(max_drop=0.25)).passed


def test_new_classes_that_are_only_guessed_are_refused() -> None:
    guessed = candidate([2, 3] * 12, before=[0] * 24, after=[2] * 24)
    gate = decide(guessed, limits=GateLimits())
    assert not gate.passed
    assert "no better than guessing" in gate.reasons[0]
    assert decide(guessed, limits=GateLimits(min_new=0.5)).passed
    assert not decide(guessed, limits=GateLimits(min_new=0.51)).passed


@pytest.mark.parametrize(
    ("right", "of", "classes", "guessed"),
    [
        (4, 20, 5, True),
        (8, 20, 5, False),
        (90, 200, 5, False),
        (0, 6, 3, False),
        (24, 24, 2, False),
        (0, 99, 1, False),
    ],
)
def test_guessing_is_told_from_learning_and_from_bad_luck(
    right: int, of: int, classes: int, guessed: bool
) -> None:
    assert no_better_than_guessing(right, of=of, classes=classes) is guessed


def test_a_first_version_passes_but_for_what_was_asked() -> None:
    first = GateInput(
        judged=answers([2, 3] * 12, [2] * 24), parent=None, older=(), newest=NEW, model_bytes=1000
    )
    assert decide(first, limits=GateLimits()).passed
    assert not decide(first, limits=GateLimits(min_new=0.6)).passed
    assert decide(first, limits=GateLimits()).notes == ()


def test_budgets_are_kept() -> None:
    case = replace(candidate([2], before=[0], after=[2]), latency_ms=5.0)
    assert decide(case, limits=GateLimits(max_latency_ms=5, max_bytes=1000)).passed
    gate = decide(case, limits=GateLimits(max_latency_ms=4.9, max_bytes=999))
    assert "more than the 4.9 ms allowed" in gate.reasons[0]
    assert "1000 bytes, more than the 999 allowed" in gate.reasons[1]


def test_what_could_not_be_judged_is_said() -> None:
    nothing = decide(candidate([], before=[], after=[]), limits=GateLimits())
    assert nothing.passed
    assert nothing.p_value is None
    assert nothing.notes == (
        "new classes were not judged: there was no image of them to judge by; give more "
        "validation images",
        "old classes were not judged: there was no image of them to judge by; give more "
        "validation images",
    )
    assert nothing.not_judged == ("new", "old")
    labels = [0] * 6 + [2] * 12
    some = decide(candidate(labels, before=[0] * 18, after=labels), limits=GateLimits())
    assert some.notes == ("not judged, for want of images to judge by: 'b'",)
    assert (some.not_judged, some.old_images, some.new_images) == ((), 6, 12)


@pytest.mark.parametrize(("old", "new"), [(5, 11), (5, 12), (6, 11), (6, 12)])
def test_a_side_is_judged_from_as_many_images_as_could_refuse_it(old: int, new: int) -> None:
    labels = [0] * old + [2, 3] * 6
    labels = labels[: old + new]
    wrong = candidate(labels, before=[0] * len(labels), after=[1] * len(labels))
    right = candidate(labels, before=[0] * len(labels), after=labels)
    few = decide(right, limits=GateLimits()).not_judged
    assert few == (("new",) if new < 12 else ()) + (("old",) if old < 6 else ())
    against = decide(wrong, limits=GateLimits()).reasons
    assert any("old classes fell" in one for one in against) is ("old" not in few)
    assert any("guessing" in one for one in against) is ("new" not in few)


def test_min_new_without_evidence_refuses_and_0_asks_for_none() -> None:
    four = candidate([2, 3] * 2, before=[0] * 4, after=[2, 3] * 2)
    gate = decide(four, limits=GateLimits(min_new=0.8))
    assert gate.reasons == (
        "a least accuracy of 80.0 % cannot be judged by 4 images of new classes: 12 are needed; "
        "give more validation images",
    )
    assert decide(four, limits=GateLimits(min_new=0)).passed


def test_a_lone_new_class_that_is_never_answered_is_refused() -> None:
    lone = GateInput(
        judged=answers([2] * 12, [0] * 12),
        parent=answers([2] * 12, [0] * 12, classes=2),
        older=OLD,
        newest=("c",),
        model_bytes=1000,
    )
    assert "no better than guessing" in decide(lone, limits=GateLimits()).reasons[0]
    learnt = replace(lone, judged=answers([2] * 12, [2] * 12))
    assert decide(learnt, limits=GateLimits()).passed


@pytest.mark.parametrize(
    "limits", [{"max_drop": -0.1}, {"min_new": 1.1}, {"max_latency_ms": 0}, {"max_bytes": -1}]
)
def test_limits_that_make_no_sense_are_wrong_usage(limits: dict[str, float]) -> None:
    with pytest.raises(WrongUsage):
        GateLimits(**limits)  # type: ignore[arg-type]


def grown_version(*, near_by: float, wrong: int, slower: bool) -> GateInput:
    """A network that was grown for 48 images: of the 12 that were hard, all are answered with the
    logit `near_by` beside the best rival, and some easy ones are wrong now."""
    labels = [0, 1, 2, 3] * 12
    before = 4 * answers(labels, labels).logits_NC
    after = before.copy()
    before[:12] *= 0.05
    after[:12] *= near_by / 4
    after[12 : 12 + wrong] = after[12 : 12 + wrong, ::-1] * 0.05

    def judged(logits_NC: Floats) -> Judged:
        return replace(answers(labels, labels), logits_NC=logits_NC)

    return GateInput(
        judged=judged(after),
        parent=judged(before),
        older=(*OLD, *NEW),
        newest=NEW,
        model_bytes=0,
        deepens=True,
        slower=slower,
    )


def test_an_expert_that_costs_no_time_is_judged_by_how_sure_right_answers_are() -> None:
    surer = grown_version(near_by=3.0, wrong=1, slower=False)
    assert surer.judged.accuracy() == 47 / 48
    assert decide(surer, limits=GateLimits()).passed
    (reason,) = decide(replace(surer, slower=True), limits=GateLimits()).reasons
    assert "accuracy went from 100.0 % to 97.9 %" in reason
    assert not decide(surer, limits=GateLimits(min_gain=0.2)).passed


def test_an_expert_that_costs_no_time_and_is_less_sure_is_refused() -> None:
    as_before = grown_version(near_by=0.2, wrong=0, slower=False)
    (reason,) = decide(as_before, limits=GateLimits()).reasons
    assert "the mean probability of the right class beside its best rival" in reason
    less_sure = grown_version(near_by=0.05, wrong=0, slower=False)
    assert not decide(less_sure, limits=GateLimits(min_gain=0)).passed


LEARNING = {"effort": Effort(epochs=25, learning_rate=3e-3), "augment": "none"}


def add(store: Path, data: Path, **others: object) -> Outcome:
    return add_task(asked(store, data, **{**LEARNING, **others}), progress=Listening())


@pytest.fixture(scope="module")
def learnt_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learnt")
    letters = write_classes(folder / "letters", ["a", "b"], images=40)
    assert add(folder / "models", letters).promoted
    return folder / "models"


@pytest.fixture
def learnt(learnt_once: Path, tmp_path: Path) -> Path:
    """A store whose version 1 knows a and b: eight images are held out."""
    return Path(shutil.copytree(learnt_once, tmp_path / "models"))


def sabotage_old_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    def learn_and_spoil(*arguments: object, **named: object) -> Learnt:
        learnt = learn(*arguments, **named)  # type: ignore[arg-type]
        arguments[0].network.heads[0].weight.mul_(-1)  # type: ignore[attr-defined]
        return learnt

    monkeypatch.setattr("trainer.versions.one_version.learn", learn_and_spoil)


def test_a_version_whose_old_accuracy_was_sabotaged_is_published_and_not_promoted(
    learnt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage_old_heads(monkeypatch)
    digits = write_classes(tmp_path / "digits", ["0", "1"])
    outcome = add(learnt, digits, shape=NetworkShape())
    assert not outcome.promoted
    assert outcome.refused is not None
    assert outcome.refused.startswith("the gate refused it: accuracy on old classes fell")
    assert "`dne-store promote 2 --channel production`" in outcome.refused
    gate = Store.open(str(learnt)).manifest(2).metrics.gate
    assert gate is not None
    assert (gate.passed, gate.forced) == (False, False)
    assert gate.worse
    assert outcome.as_json()["gate"]["worse"][0]["class"] in {"a", "b"}
    head = Store.open(str(learnt)).head("production")
    assert head is not None
    assert head.target == 1


@pytest.mark.long
def test_force_promotes_and_is_recorded(
    learnt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage_old_heads(monkeypatch)
    digits = write_classes(tmp_path / "digits", ["0", "1"])
    outcome = add(learnt, digits, shape=NetworkShape(), limits=GateLimits(force=True))
    assert (outcome.promoted, outcome.refused) == (True, None)
    gate = outcome.manifest.metrics.gate
    assert gate is not None
    assert (gate.passed, gate.forced) == (False, True)
    head = Store.open(str(learnt)).head("production")
    assert head is not None
    assert head.target == 2
    assert "(forced: accuracy on old classes fell" in head.reason


@pytest.mark.long
def test_a_version_trained_on_shuffled_labels_is_refused(learnt: Path, tmp_path: Path) -> None:
    shuffled = tmp_path / "shuffled"
    names = ["0", "1", "2"]
    write_classes(shuffled, names, images=200)
    files = sorted(shuffled.rglob("*.png"))
    contents = [path.read_bytes() for path in files]
    for path, place in zip(files, np.random.default_rng(1).permutation(len(files)), strict=True):
        path.write_bytes(contents[place])
    outcome = add(learnt, shuffled, shape=NetworkShape())
    assert outcome.refused is not None
    assert "no better than guessing" in outcome.refused


def test_a_version_that_learns_and_keeps_passes(learnt: Path, tmp_path: Path) -> None:
    digits = write_classes(tmp_path / "digits", ["0", "1"], images=60)
    limits = GateLimits(min_new=0.5, max_latency_ms=60_000, max_bytes=10**9)
    outcome = add(learnt, digits, shape=NetworkShape(), limits=limits)
    assert outcome.promoted
    gate = outcome.manifest.metrics.gate
    assert gate is not None
    assert gate.passed
    assert gate.latency_ms is not None
    assert gate.latency_ms > 0


@pytest.mark.long
def test_the_parent_is_judged_by_its_own_classifier(learnt: Path, tmp_path: Path) -> None:
    first = Store.open(str(learnt)).manifest(1).metrics.accuracy.all
    digits = write_classes(tmp_path / "digits", ["0", "1"])
    second = add(learnt, digits, shape=NetworkShape()).manifest.metrics.accuracy
    assert second.parent_old == first
