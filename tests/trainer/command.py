"""`dne-train` as a person would call it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from model_store.store.store import Store
from tests.machine import know_machine
from tests.trainer.folders import SIZES
from trainer.cli import main


class Command:
    """`dne-train` in this process, on one store."""

    def __init__(self, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.store, self._capsys = store, capsys
        self.out = self.err = ""

    def __call__(self, *arguments: object) -> int:
        try:
            code = main([*map(str, arguments), "--store", str(self.store)])
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        self.out, self.err = self._capsys.readouterr()
        return code

    def add(self, data: Path, *others: object) -> int:
        know_machine()
        sizes: Sequence[object] = () if "--preset" in others else SIZES
        return self("add-task", "--data", data, "--epochs", 1, *sizes, *others)

    @property
    def versions(self) -> list[int]:
        return Store.open(str(self.store)).versions() if self.store.exists() else []
