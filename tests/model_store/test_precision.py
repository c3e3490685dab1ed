"""A reduced precision is used where it was shown to run and to agree, and nowhere else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from model_store import precision
from model_store.errors import WrongUsage
from model_store.host import machine
from model_store.precision import Trial, choose, refuse_unless_it_runs, try_in_child, try_out
from model_store.records.quality import Reduced

FAST = Trial(runs=True, speedup=2.0)
SLOW = Trial(runs=True, speedup=0.4)
DEAD = Trial(runs=False, reason="it died")


def never(name: Reduced) -> Trial:
    raise AssertionError(f"{name} was tried without need")


def test_auto_takes_the_fastest_that_agrees() -> None:
    agreement: dict[Reduced, float] = {"bf16": 1.0, "int8": 0.96}
    trials = {"bf16": Trial(runs=True, speedup=1.5), "int8": FAST}
    chosen = choose(agreement, asked="auto", offered=("bf16", "int8"), try_out=trials.__getitem__)
    assert chosen.precision == "int8"
    trials["int8"] = SLOW
    chosen = choose(agreement, asked="auto", offered=("bf16", "int8"), try_out=trials.__getitem__)
    assert chosen.precision == "bf16"


def test_auto_stays_with_single_precision_where_nothing_is_faster() -> None:
    chosen = choose({"int8": 1.0}, asked="auto", offered=("int8",), try_out=lambda name: SLOW)
    assert chosen.precision == "fp32"


@pytest.mark.parametrize("asked", ["auto", "int8"])
def test_a_precision_that_disagrees_is_refused_and_not_even_tried(
    asked: precision.Asked,
) -> None:
    chosen = choose({"int8": 0.9599}, asked=asked, offered=("int8",), try_out=never)
    assert chosen.precision == "fp32"
    assert "96.0 % only on held-out images" in chosen.refused[0]


@pytest.mark.parametrize("asked", ["auto", "int8"])
def test_without_held_out_images_it_is_single_precision(asked: precision.Asked) -> None:
    chosen = choose({}, asked=asked, offered=("int8",), try_out=never)
    assert chosen.precision == "fp32"
    assert "was not compared" in chosen.refused[0]


@pytest.mark.parametrize("asked", ["auto", "int8"])
def test_a_precision_that_kills_its_trial_is_refused(asked: precision.Asked) -> None:
    chosen = choose({"int8": 1.0}, asked=asked, offered=("int8",), try_out=lambda name: DEAD)
    assert chosen.precision == "fp32"
    assert "does not run here: it died" in chosen.refused[0]


def test_one_that_was_asked_for_is_used_however_fast_it_is() -> None:
    chosen = choose({"int8": 1.0}, asked="int8", offered=("int8",), try_out=lambda name: SLOW)
    assert chosen.precision == "int8"
    chosen = choose({"int8": 1.0}, asked="fp32", offered=("int8",), try_out=never)
    assert chosen.precision == "fp32"


def test_a_child_that_meets_an_illegal_instruction_is_outlived() -> None:
    script = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    trial = try_in_child([sys.executable, "-c", script])
    assert not trial.runs
    assert "SIGILL" in trial.reason
    assert trial.lasting  # it would do so again


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("raise SystemExit('no such package')", "no such package"),
        ("import time; time.sleep(60)", "longer than"),
        ("pass", "said nothing"),
    ],
)
def test_other_failures_say_what_they_were_and_are_tried_again(script: str, reason: str) -> None:
    trial = try_in_child([sys.executable, "-c", script], timeout_s=2)
    assert not trial.runs
    assert reason in trial.reason
    assert not trial.lasting


def test_what_was_found_out_is_remembered_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DNE_CACHE", str(tmp_path / "cache"))
    answers = [Trial(runs=False, reason="busy", lasting=False), FAST]
    monkeypatch.setattr(precision, "try_in_child", lambda command: answers.pop(0))
    assert try_out("int8").reason == "busy"
    assert try_out("int8") == FAST
    assert try_out("int8") == FAST  # there was no third trial
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    answers.append(SLOW)
    assert try_out("int8") == SLOW  # other instructions, another machine


@pytest.mark.parametrize("kept", [b"{", b"[]", b'{"a": {"int8": {"runs": 1}}}', b"\xff"])
def test_a_damaged_memory_costs_a_trial(
    kept: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DNE_CACHE", str(tmp_path))
    (tmp_path / precision.REMEMBERED).write_bytes(kept)
    monkeypatch.setattr(precision, "try_in_child", lambda command: FAST)
    assert try_out("int8") == FAST
    assert json.loads((tmp_path / precision.REMEMBERED).read_text())


def test_a_precision_asked_for_by_name_that_cannot_be_had_is_wrong_usage() -> None:
    with pytest.raises(WrongUsage, match="does not run here: it died"):
        refuse_unless_it_runs("int8", offered=("int8",), backend="onnx", try_out=lambda name: DEAD)
    with pytest.raises(WrongUsage, match="the backend onnx has none"):
        refuse_unless_it_runs("bf16", offered=("int8",), backend="onnx")
    refuse_unless_it_runs("auto", offered=("int8",), backend="onnx", try_out=never)


def test_eight_bits_run_on_the_machine_that_tests_run_on() -> None:
    pytest.importorskip("onnxruntime", reason="ONNX NOT TRIED: onnxruntime is not installed")
    trial = try_out("int8")
    assert trial.runs, trial.reason
    assert trial.speedup > 0


def test_16_bits_are_tried_on_the_machine_that_tests_run_on_and_are_outlived() -> None:
    trial = try_out("bf16")
    assert trial.speedup > 0 if trial.runs else "SIGILL" in trial.reason


@pytest.mark.gpu
def test_16_bits_run_on_a_gpu() -> None:
    trial = try_out("bf16", device="cuda")
    assert trial.runs, trial.reason
    assert trial.speedup > 0


def test_a_gpu_is_remembered_apart_from_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DNE_CACHE", str(tmp_path / "cache"))
    answers = [SLOW, FAST]
    monkeypatch.setattr(precision, "try_in_child", lambda command: answers.pop(0))
    assert try_out("bf16") == SLOW
    assert try_out("bf16", device="cuda") == FAST
    assert (try_out("bf16"), try_out("bf16", device="cuda")) == (SLOW, FAST)
    other = tmp_path / "nvidia"
    (other / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (other / "gpus" / "0000:01:00.0" / "information").write_text("Model: \t Another\nIRQ: 5\n")
    monkeypatch.setattr(machine, "NVIDIA", other)
    answers.append(SLOW)
    assert try_out("bf16", device="cuda") == SLOW  # another GPU, another machine


def test_eight_bits_are_tried_on_the_processor_whatever_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DNE_CACHE", str(tmp_path / "cache"))
    asked: list[list[str]] = []

    def child(command: list[str]) -> Trial:
        asked.append(command[2:])
        return FAST

    monkeypatch.setattr(precision, "try_in_child", child)
    try_out("int8", device="cuda")
    assert asked == [["model_store.onnx.int8_trial", "int8"]]
