"""The memory of a pass: what the server reckons with, against what processes took."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.campaigns import AddRow

pytestmark = pytest.mark.slow

SHAPES: dict[str, dict[str, Any]] = {
    "small": {"image_size": 64, "patch_size": 8, "depth": 5, "heads": [6, 4, 4, 4]},
    "paper": {"image_size": 32, "patch_size": 4, "depth": 5, "heads": [12, 12, 12]},
    "patch 1": {"image_size": 32, "patch_size": 1, "depth": 1, "heads": [1, 8]},
    "64 heads": {
        "image_size": 32,
        "patch_size": 2,
        "depth": 2,
        "head_width": 4,
        "heads": [1, 64],
    },
}


def measured(backend: str, shape: dict[str, Any]) -> tuple[int, int]:
    command = [sys.executable, "-m", "tests.abuse.one_pass", backend, "8", json.dumps(shape)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    took, estimate = json.loads(done.stdout.splitlines()[-1])
    return took, estimate


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel keeps the highest memory of a process"
)
def test_a_pass_takes_what_it_was_estimated_to_take(abuse_row: AddRow) -> None:
    ratios = []
    for name, shape in SHAPES.items():
        for backend in ("torch", "onnx"):
            took, estimate = measured(backend, shape)
            assert estimate > 0.9 * took, (name, backend, took, estimate)
            assert estimate < 3 * took + (64 << 20), (name, backend, took, estimate)
            ratios.append(estimate / took)
    how = f"{len(ratios)} passes of 8 images, each in a process"
    result = f"estimate {min(ratios):.2f} to {max(ratios):.2f} of what was taken"
    abuse_row("memory of a pass", how, result)
