"""A store to be, two tasks, and the command that learns them; some tests have others instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.command import Command
from tests.trainer.folders import write_classes


@pytest.fixture(autouse=True)
def _forecasts_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A steady time takes a hundred runs, and hundreds of tasks are learnt here; `test_forecast`
    looks at the time itself."""
    monkeypatch.setattr("trainer.evaluation.forecast.MOST_RUNS", 7)


@pytest.fixture
def dne_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path / "models", capsys)


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    return write_classes(tmp_path / "letters", ["a", "b"])


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    return write_classes(tmp_path / "digits", ["0", "1"])
