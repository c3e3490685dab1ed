"""Tests that need a GPU say so where there is none: a skip among hundreds would not be noticed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.packaging.project import ROOT


@pytest.mark.long
def test_tests_that_need_a_gpu_are_skipped_loudly() -> None:
    if torch.cuda.is_available():
        pytest.skip("THE ABSENCE OF A GPU NOT TRIED: there is one")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-r", "N"]
    ended = subprocess.run(
        [*command, "tests/dne_serve/engines/test_cuda.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    assert "tests marked gpu were not run: there is no CUDA device" in ended.stdout
    assert "passed" not in ended.stdout
