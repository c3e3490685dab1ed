from __future__ import annotations

import pytest

from trainer.learning.plan import Plan


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
