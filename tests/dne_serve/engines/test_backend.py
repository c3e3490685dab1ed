"""The engine that `--backend auto` takes, and that a server says which one it took."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from dne_serve.cli import main
from dne_serve.engines import choose, measure
from dne_serve.engines.candidates import (
    CANDIDATES,
    REMEMBERED,
    Candidate,
    Measurement,
    Request,
    fastest,
)
from dne_serve.engines.choose import Choice, Measuring, Wanted, begin_choosing, served_by
from dne_serve.settings import load_settings
from model_store.errors import WrongUsage
from model_store.precision import Trial, remember_trial, remembered_trial
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.engines.test_precision import agreeing
from tests.dne_serve.test_cli import running

pytest.importorskip("onnxruntime", reason="ONNX NOT TRIED: onnxruntime is not installed")

TORCH, PLAIN, PLAIN_2, PACKED, PACKED_2 = CANDIDATES
WANTED = Wanted(device="cpu", threads=2, max_batch=16, precision="auto", room_bytes=8 << 30)


class Child:
    """A measurement that has said some lines."""

    def __init__(self, said: str, *, ends: bool = True, errors: str = "") -> None:
        self._said, self._errors = said, errors
        self._ends = ends
        self.killed = False
        self.returncode = -4 if ends and not said else 0

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        if not self._ends and not self.killed:
            raise subprocess.TimeoutExpired("measure", timeout or 0)
        return self._said, self._errors

    def kill(self) -> None:
        self.killed = True


class Measurements:
    """Stands in for the child process."""

    def __init__(self) -> None:
        self.child = Child("")
        self.asked: list[Request] = []

    def __call__(self, request: Request) -> Child:
        self.asked.append(request)
        return self.child


@pytest.fixture(autouse=True)
def _nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5))


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> Measurements:
    made = Measurements()
    monkeypatch.setattr(choose, "_measure", made)
    return made


def line(
    best: Candidate, *, enough: bool = True, of: Sequence[Candidate] = CANDIDATES, int8: float = 0.0
) -> str:
    figures = {one.name: {"8": 90.0 if one == best else 60.0} for one in of}
    told = {"figures": figures, "enough": enough, "int8_speedup": int8 or None}
    return json.dumps(told) + "\n"


def chosen(served: Manifest | None, wanted: Wanted = WANTED) -> Choice:
    return begin_choosing(wanted, served=served).choice()


def test_the_server_chooses_unless_told_otherwise() -> None:
    assert load_settings().backend == "auto"


def test_the_fastest_over_all_loads_is_taken() -> None:
    figures = {TORCH.name: {"1": 40.0, "8": 50.0}, PLAIN_2.name: {"1": 30.0, "8": 90.0}}
    assert fastest(figures, CANDIDATES) == PLAIN_2


def test_of_two_that_are_equally_fast_the_first_by_long_runs_and_memory_is_taken() -> None:
    rates = {PLAIN: 50.0, PLAIN_2: 86.0, PACKED: 50.0, PACKED_2: 100.0}
    figures = {one.name: {"8": rate} for one, rate in rates.items()}
    assert fastest(figures, CANDIDATES) == PLAIN_2
    assert fastest(figures, (TORCH, PLAIN, PACKED_2)) == PACKED_2
    assert fastest({**figures, PLAIN_2.name: {"8": 84.0}}, CANDIDATES) == PACKED_2


def test_a_candidate_that_lost_at_the_first_load_is_not_taken_for_it() -> None:
    figures = {TORCH.name: {"8": 70.0}, PLAIN.name: {"1": 40.0, "8": 90.0}}
    assert fastest(figures, CANDIDATES) == PLAIN


def test_a_choice_is_measured_once_for_a_shape_and_says_its_figures(
    letters: Manifest, measurements: Measurements
) -> None:
    measurements.child = Child(line(PACKED_2))
    first = chosen(letters)
    assert first.candidate == PACKED_2
    assert "torch 60" in first.why
    assert "onnx, packed weights, 2 workers 90" in first.why
    assert chosen(letters).candidate == PACKED_2
    assert len(measurements.asked) == 1
    chosen(letters, replace(WANTED, threads=4))
    assert len(measurements.asked) == 2  # other threads, another choice


def test_a_measurement_is_waited_for_no_longer_than_its_time(
    letters: Manifest, measurements: Measurements
) -> None:
    measurements.child = Child(line(PACKED, enough=False) + '{"figures": {"to', ends=False)
    assert chosen(letters).candidate == PACKED
    assert measurements.child.killed
    measurements.child = Child("", ends=False)
    choice = chosen(letters)  # figures of one load are not remembered
    assert (choice.candidate, choice.why) == (
        PLAIN_2,
        "not measured, as 5 s were too short for it",
    )


def test_a_measurement_that_dies_says_why(
    letters: Manifest, measurements: Measurements, caplog: pytest.LogCaptureFixture
) -> None:
    measurements.child = Child("")
    why = chosen(letters).told
    assert why.endswith("not measured, as the measurement was ended by SIGILL")
    measurements.child = Child("", errors="Traceback:\n  line 5\nTypeError: \x1b[31mno pooling\n")
    why = chosen(letters).told
    assert why.endswith("was ended by SIGILL: TypeError:  [31mno pooling")
    assert "SIGILL: Traceback: | line 5 | TypeError:  [31mno pooling" in caplog.text


def test_figures_of_a_busy_machine_are_used_and_not_remembered(
    letters: Manifest, measurements: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (4096.0, 0.5, 0.5))
    measurements.child = Child(line(PACKED))
    assert [chosen(letters).candidate, chosen(letters).candidate] == [PACKED, PACKED]
    assert len(measurements.asked) == 2


@pytest.mark.parametrize("kept", [b"{", b"[]", b"[[[", b"5", b"\xff", b'{"a": 5}', b'["ab"]'])
def test_a_damaged_memory_costs_a_measurement(
    kept: bytes, tmp_path: Path, letters: Manifest, measurements: Measurements
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / REMEMBERED).write_bytes(kept)
    measurements.child = Child(line(PLAIN))
    assert chosen(letters).candidate == PLAIN
    assert chosen(letters).candidate == PLAIN
    assert len(measurements.asked) == 1


@pytest.mark.parametrize("name", ["a command", 5, None, {"backend": "x"}])
def test_a_remembered_choice_is_a_candidate_or_nothing(
    name: object, tmp_path: Path, letters: Manifest, measurements: Measurements
) -> None:
    measurements.child = Child(line(PLAIN))
    chosen(letters)
    path = tmp_path / "cache" / REMEMBERED
    path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), name)))
    assert chosen(letters).candidate == PLAIN
    assert len(measurements.asked) == 2


def test_eight_bits_are_measured_where_they_agree_and_run(
    letters: Manifest, measurements: Measurements
) -> None:
    measurements.child = Child(line(PLAIN_2, enough=False, int8=1.8))
    chosen(letters)
    chosen(agreeing(letters, 0.98))
    chosen(agreeing(letters, 0.995))
    assert [one.reduced for one in measurements.asked] == [(), (), ("int8",)]
    assert remembered_trial("int8") == Trial(runs=True, speedup=1.8)
    remember_trial("int8", Trial(runs=False, reason="SIGILL"))
    chosen(agreeing(letters, 0.995))
    assert measurements.asked[-1].reduced == ()


def test_a_precision_that_was_asked_for_decides(
    letters: Manifest, measurements: Measurements
) -> None:
    assert chosen(letters, replace(WANTED, precision="bf16")).candidate == TORCH
    measurements.child = Child(line(PLAIN, of=CANDIDATES[1:]))
    chosen(agreeing(letters, 1.0), replace(WANTED, precision="int8"))
    assert measurements.asked[-1].candidates == CANDIDATES[1:]
    chosen(agreeing(letters, 1.0), replace(WANTED, precision="fp32"))
    assert measurements.asked[-1].reduced == ()


def test_weights_are_packed_only_where_there_is_room_and_workers_where_there_are_threads(
    letters: Manifest, measurements: Measurements
) -> None:
    measurements.child = Child(line(PLAIN, of=CANDIDATES[:3]))
    chosen(letters, replace(WANTED, room_bytes=4 * letters.spec.parameters))
    assert measurements.asked[-1].candidates == CANDIDATES[:3]
    chosen(letters, replace(WANTED, threads=1))
    assert measurements.asked[-1].candidates == (TORCH, PLAIN, PACKED)


def test_a_gpu_is_for_torch(
    letters: Manifest, measurements: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurements.child = Child(line(PLAIN))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("auto", "cuda"):
        measurements.child.killed = False
        assert chosen(letters, replace(WANTED, device=device)).why == "there is a GPU"
        assert measurements.child.killed
    assert chosen(letters).candidate == PLAIN
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(WrongUsage, match="cuda"):
        chosen(letters, replace(WANTED, device="cuda"))


def test_without_the_runtime_it_is_torch(
    letters: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert chosen(letters) == Choice(candidate=TORCH, why="onnxruntime is not installed")


def test_with_nothing_to_measure_it_is_onnx() -> None:
    choice = chosen(None)
    assert choice.candidate == PLAIN_2
    assert "there is no version" in choice.why


def test_the_version_cannot_be_read_and_decides_nothing(store: Store, letters: Manifest) -> None:
    assert served_by(None, channel="production") is None
    assert served_by(store, channel="elsewhere") is None
    assert served_by(store, channel="production") == letters
    Path(store.location, "versions", "00000001.json").write_text("{}")
    assert served_by(Store.open(store.location), channel="production") is None


def test_candidates_are_measured_at_every_load_until_they_have_lost(
    digits: Manifest, measurements: Measurements, capsys: pytest.CaptureFixture[str]
) -> None:
    found = begin_choosing(WANTED, served=agreeing(digits, 1.0)).found
    assert isinstance(found, Measuring)
    asked = Measurement(request=found.request, seconds=60.0, try_int8=True)
    measure.main(asked.model_dump_json())
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["enough"]
    assert last["int8_speedup"] > 0
    assert list(last["figures"]) == [one.name for one in CANDIDATES]
    rates = max(last["figures"].values(), key=len)
    assert list(rates) == ["1", "8", "32"]
    assert min(rates.values()) > 0


@pytest.mark.long
def test_a_server_says_which_engine_it_took_and_why(store: Store, digits: Manifest) -> None:
    with running("--store", store.location, "--backend", "auto", "--device", "cpu") as (_, url):
        ready = httpx.get(f"{url}/readyz").json()
        assert ready["engine"].startswith(ready["backend"])
        assert "measured" in ready["engine"]
        assert httpx.get(f"{url}/v2/models/dne").json()["platform"] == f"dne_{ready['backend']}"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--backend", "onnx", "--precision", "bf16"), "the backend onnx has none"),
        (("--backend", "torch", "--precision", "int8"), "the backend torch has none"),
    ],
)
def test_a_precision_that_a_backend_does_not_have_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: tuple[str, ...], says: str
) -> None:
    assert main(["--store", str(tmp_path), "--port", "0", *given]) == 2
    assert says in capsys.readouterr().err
