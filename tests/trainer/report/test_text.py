"""What a person reads at the end of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from trainer.report.text import tell_poor


def outcome(accuracy: float | None, *, is_pretrained: bool) -> Any:
    """An outcome with the little that is asked of it."""
    spec = SimpleNamespace(is_pretrained=is_pretrained)
    return SimpleNamespace(
        as_json=lambda: {"accuracy": {"all": accuracy}}, manifest=SimpleNamespace(spec=spec)
    )


@pytest.mark.parametrize(
    ("accuracy", "is_pretrained", "lines"), [(0.44, False, 2), (0.44, True, 1), (0.7, False, 0)]
)
def test_a_poor_version_is_called_poor_whatever_the_gate_says(
    accuracy: float, is_pretrained: bool, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    tell_poor(cast(Any, outcome(accuracy, is_pretrained=is_pretrained)))
    told = capsys.readouterr().out.splitlines()
    assert len(told) == lines
    if lines:
        assert told[0].startswith("this version is poor: 56.0 % of the images")
    if lines == 2:
        assert told[1].endswith("begin a new store with --pretrained dinov2-small")
