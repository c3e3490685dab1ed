"""Heads that are fitted anew: the stand-ins, the statistics, and what a fit leaves alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lab.methods.dne import Dne
from lab.variants.refit import TaskStatistics, keep_statistics, with_younger
from model_store.errors import WrongUsage
from tests.lab.striped import state_of
from tests.lab.three_tasks import different, learnt
from trainer.embeddings.statistics import stand_ins


def test_kept_statistics_make_stand_ins_of_the_same_mean_and_scatter() -> None:
    draw = np.random.default_rng(0)
    tokens = draw.normal(size=(40, 6)).astype(np.float32)
    labels = np.arange(40) % 4
    kept = TaskStatistics(classes=2, width=6)
    keep_statistics(kept, tokens, labels, old=2)
    for place, statistics in enumerate(kept.each()):
        own = tokens[labels == 2 + place].astype(np.float64)
        made = stand_ins(statistics, seed=0)
        assert len(made) == len(own) == 10
        np.testing.assert_allclose(made.mean(axis=0), own.mean(axis=0), atol=1e-9)
        np.testing.assert_allclose(np.cov(made.T), np.cov(own.T), atol=1e-9)


def test_stand_ins_take_the_channels_of_younger_experts_from_exemplars_in_turn() -> None:
    exemplars = np.array([[9, 9, 1], [9, 9, 2]], dtype=np.float32)
    made = with_younger(np.zeros((3, 2)), exemplars)
    assert made.tolist() == [[0, 0, 1], [0, 0, 2], [0, 0, 1]]
    with pytest.raises(WrongUsage, match="larger memory"):
        with_younger(np.zeros((3, 2)), exemplars[:0])


@pytest.mark.slow
@pytest.mark.parametrize("head", ["fitted", "statistics"])
def test_fitted_heads_learn_three_tasks_from_the_same_first_experts(
    head: str, tmp_path: Path
) -> None:
    plain = learnt("dne", tmp_path)
    fitted = learnt(f"dne:head={head}", tmp_path)
    assert plain.base_path == fitted.base_path
    assert fitted.lines[0].shared_base
    assert fitted.lines[-1].accuracy > 2 / 6
    assert isinstance(fitted.method, Dne)
    expert = {
        name: one for name, one in state_of(plain.method).items() if "network.experts.0" in name
    }
    assert different(expert, state_of(fitted.method)) == []
    assert len(fitted.method.statistics) == (3 if head == "statistics" else 0)
