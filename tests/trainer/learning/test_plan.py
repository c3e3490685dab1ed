from __future__ import annotations

import numpy as np
import pytest

from trainer.data.folders import LabelledImages
from trainer.data.sampling import evened
from trainer.learning.plan import Plan, log_counts


@pytest.mark.parametrize(
    ("balanced", "epochs"),
    [
        pytest.param(1_000, 7, id="epochs-of-equal-length"),
        pytest.param(200, 35, id="short-epochs-are-more"),
        pytest.param(50_000, 1, id="never-none"),
    ],
)
def test_tuning_takes_a_share_of_the_steps_however_long_its_epochs(
    balanced: int, epochs: int
) -> None:
    plan = Plan(epochs=20, batch_size=32, learning_rate=1e-3)
    tuning = plan.for_tuning(learnt=1_000, balanced=balanced)
    assert (tuning.epochs, tuning.batch_size) == (epochs, 32)
    assert tuning.learning_rate == pytest.approx(3e-4)


def test_the_counts_of_an_epoch_are_even_for_new_classes_and_one_for_classes_without_images() -> (
    None
):
    labels = np.repeat([0, 2, 3], [2, 4, 8])
    images = LabelledImages(
        classes=("old", "lost", "new", "newer"),
        pixels_NHWC=np.zeros((len(labels), 8, 8, 3), dtype=np.uint8),
        labels_N=labels,
    )
    counts = log_counts(evened(images, among=("new", "newer")), images).exp()
    assert counts.tolist() == pytest.approx([2, 1, 6, 6])
