from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from model_store.errors import WrongUsage
from model_store.records.quality import ClassThreshold, Unknown
from model_store.store.store import Store
from tests.tiny_versions import promote, publish_tiny
from tests.trainer.folders import Listening, asked, pixels_of, write_classes
from trainer.add_task import add_task
from trainer.evaluation.evaluate import evaluate
from trainer.evaluation.unknown import Doubted, auroc, fit_threshold, tell_apart
from trainer.request import Evaluate


def test_about_the_rate_of_known_images_falls_below_the_threshold() -> None:
    known = np.random.default_rng(0).normal(size=199)
    detector = fit_threshold(known, score="log-odds", rate=0.05)
    assert detector is not None
    assert (known < detector.threshold).sum() == 10
    assert (detector.score, detector.rate, detector.images) == ("log-odds", 0.05, 199)
    others = np.random.default_rng(1).normal(size=20_000)
    assert (others < detector.threshold).mean() == pytest.approx(0.05, abs=0.02)


def test_the_threshold_lies_between_two_scores_at_the_conformal_place() -> None:
    for images, threshold in ((19, 1.1), (29, 1.5), (37, 1.9), (59, 3.1)):
        detector = fit_threshold(np.arange(1.0, images + 1), score="max-logit", rate=0.05)
        assert detector is not None
        assert detector.threshold == pytest.approx(threshold)


def test_with_too_few_images_for_the_rate_none_of_them_is_refused() -> None:
    detector = fit_threshold(np.array([3.0, 1.0, 2.0]), score="max-logit", rate=0.05)
    assert detector is not None
    assert detector.threshold == pytest.approx(1.0)


def test_the_lower_threshold_of_held_out_and_left_out_images_counts() -> None:
    held_out, left_out = np.arange(1.0, 20.0), np.arange(-1.0, 18.0)
    for one, other in ((held_out, left_out), (left_out, held_out)):
        detector = fit_threshold(one, score="log-odds", rate=0.05, left_out_N=other)
        assert detector is not None
        assert detector.threshold == pytest.approx(-0.9)
    nothing = fit_threshold(held_out, score="log-odds", rate=0.05, left_out_N=np.zeros(0))
    assert nothing is not None
    assert nothing.threshold == pytest.approx(1.1)


def test_with_nothing_held_out_there_is_no_threshold() -> None:
    assert fit_threshold(np.zeros(0), score="max-logit", rate=0.05) is None


def test_auroc_counts_pairs() -> None:
    known, unknown = np.array([1.0, 2.0, 3.0]), np.array([0.0, 2.0])
    pairs = [1.0 if k > u else 0.5 if k == u else 0.0 for k in known for u in unknown]
    assert auroc(known, unknown) == pytest.approx(np.mean(pairs))


def doubted(*scores: float) -> Doubted:
    return Doubted(scores_N=np.array(scores), nearest=["cat"] * len(scores))


def test_what_is_told_apart_and_what_cannot_be_said() -> None:
    detector = Unknown(score="max-logit", threshold=1.5, rate=0.05, images=9)
    told = tell_apart(doubted(1.0, 2.0), doubted(0.5, 1.0, 1.2, 9.0), detector=detector)
    assert told["refused_known"] == 0.5
    assert told["false_accept_rate"] == 0.25
    assert told["images"] == 4
    bare = tell_apart(doubted(1.0), doubted(0.5), detector=None)
    assert (bare["auroc"], bare["false_accept_rate"], bare["refused_known"]) == (1.0, None, None)
    assert tell_apart(doubted(1.0), None, detector=detector)["auroc"] is None


def test_images_are_refused_by_the_threshold_of_the_class_that_they_are_most_like() -> None:
    own = ClassThreshold(above=0.9, actor="ann", reason="", time="2026-01-01T00:00:00Z")
    detector = Unknown(score="log-odds", threshold=0.0, rate=0.05, images=9, by_class={"cat": own})
    known = Doubted(scores_N=np.array([-1.0, -1.0, -3.0]), nearest=["cat", "dog", "cat"])
    told = tell_apart(known, known, detector=detector)
    assert told["refused_known"] == pytest.approx(2 / 3)
    assert told["false_accept_rate"] == pytest.approx(1 / 3)
    assert told["auroc"] == 0.5


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, float("nan")])
def test_a_rate_that_makes_no_sense_is_wrong_usage(rate: float) -> None:
    with pytest.raises(WrongUsage, match="`unknown_rate`"):
        asked(Path("models"), Path("letters"), unknown_rate=rate)


def test_a_version_carries_the_threshold_that_was_asked_for(tmp_path: Path) -> None:
    letters = write_classes(tmp_path / "letters", ["a", "b"])
    few = write_classes(tmp_path / "few", ["c"], images=3)
    store = tmp_path / "models"
    manifest = add_task(asked(store, letters, unknown_rate=0.25), progress=Listening()).manifest
    assert manifest.unknown is not None
    assert (manifest.unknown.rate, manifest.unknown.images) == (0.25, 4)
    without = add_task(asked(tmp_path / "other", few), progress=Listening()).manifest
    assert without.unknown is None
    assert without.calibration.temperature == 1.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.create(str(tmp_path / "models"))
    promote(store, publish_tiny(store))
    return store


def judged(store: Store, tmp_path: Path, strangers: Path) -> dict[str, object]:
    known = write_classes(tmp_path / "known", ["a", "b"], images=3)
    request = Evaluate(
        store=store.location,
        data=known,
        channel="production",
        unknown_data=strangers,
        device="cpu",
    )
    told = evaluate(request, progress=Listening())["unknown"]
    assert isinstance(told, dict)
    return told


def test_unknown_images_may_lie_in_folders_or_loose(store: Store, tmp_path: Path) -> None:
    strangers = write_classes(tmp_path / "strangers", ["x", "y"], images=2)
    Image.fromarray(pixels_of("z", 1)[0]).save(strangers / "z.png")
    (strangers / ".DS_Store").write_bytes(b"")
    told = judged(store, tmp_path, strangers)
    assert told["images"] == 5
    assert 0 <= float(str(told["auroc"])) <= 1


def test_loose_unknown_images_need_no_folders(store: Store, tmp_path: Path) -> None:
    assert judged(store, tmp_path, write_classes(tmp_path, ["x"], images=2) / "x")["images"] == 2


@pytest.mark.parametrize(
    ("classes", "sentence"),
    [(["a", "x"], "holds 'a', which the model knows"), ([], "does not exist")],
)
def test_what_is_not_unknown_is_wrong_usage(
    store: Store, tmp_path: Path, classes: list[str], sentence: str
) -> None:
    with pytest.raises(WrongUsage, match=f"`unknown_data=.*{sentence}"):
        judged(store, tmp_path, write_classes(tmp_path / "strangers", classes, images=2))


def test_a_folder_without_unknown_images_is_wrong_usage(store: Store, tmp_path: Path) -> None:
    (tmp_path / "strangers").mkdir()
    with pytest.raises(WrongUsage, match="holds no images"):
        judged(store, tmp_path, tmp_path / "strangers")
