"""Growing is proposed where there is much to win, and nowhere else."""

from __future__ import annotations

import pytest

from model_store.records.manifest import Scalar
from model_store.worth import CROSS_VALIDATED, Worth, worth_growing


def test_a_classifier_with_many_errors_is_worth_growing() -> None:
    found = worth_growing({CROSS_VALIDATED: 0.62}, images=400, classes=10)
    assert found is not None
    assert found.points == 19
    assert str(found) == (
        "cross-validation: 62.0 %; adapting the first expert to these 10 classes usually gains "
        "19 points or more"
    )


def test_an_expert_is_proposed_in_its_own_words() -> None:
    said = str(Worth(accuracy=0.62, classes=10, kind="dense", minutes=3))
    assert said == (
        "cross-validation: 62.0 %; an expert for these 10 classes takes about 3 min and usually "
        "gains 19 points or more"
    )


def test_more_is_to_win_where_earlier_blocks_tell_more_than_the_last_one() -> None:
    figures: dict[str, Scalar] = {CROSS_VALIDATED: 0.9, "readout": "wide"}
    assert worth_growing(figures, images=400, classes=10) is not None
    assert worth_growing({**figures, "readout": "narrow"}, images=400, classes=10) is None


@pytest.mark.parametrize(
    ("figures", "images", "classes"),
    [
        pytest.param({CROSS_VALIDATED: 0.97}, 400, 10, id="right-already"),
        pytest.param({CROSS_VALIDATED: 0.3}, 20, 10, id="two-images-a-class"),
        pytest.param({CROSS_VALIDATED: None}, 400, 10, id="nothing-left-out"),
        pytest.param({}, 400, 10, id="not-measured"),
        pytest.param({CROSS_VALIDATED: 0.0}, 40, 1, id="one-class"),
    ],
)
def test_there_is_silence_where_nothing_is_to_win(
    figures: dict[str, float | None], images: int, classes: int
) -> None:
    assert worth_growing(dict(figures), images=images, classes=classes) is None
