"""The engine that `--backend auto` takes at the start and after it has measured."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from dne_serve.cli import main
from dne_serve.engine_start import served_by, start_engine
from dne_serve.engines import choose, measure
from dne_serve.engines.candidates import (
    CANDIDATES,
    REMEMBERED,
    Candidate,
    Measurement,
    fastest,
    remembered,
)
from dne_serve.engines.choose import MeasuredEngines, Measuring, Wanted, candidates_for, request_for
from dne_serve.rollout import engine_switch
from dne_serve.rollout.engine_switch import Auto
from dne_serve.settings import load_settings
from model_store.errors import WrongUsage
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.engines.test_precision import agreeing
from tests.dne_serve.test_cli import running
from tests.live_server import Live, live_server, png, wait_for

pytest.importorskip("onnxruntime", reason="ONNX NOT TRIED: onnxruntime is not installed")

PLAIN, PACKED, TORCH, PLAIN_8, PACKED_8, TORCH_16 = CANDIDATES
WANTED = Wanted(threads=2, max_batch=16, precision="auto", room_bytes=8 << 30)


@pytest.fixture(autouse=True)
def _nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DNE_CACHE", str(tmp_path / "cache"))


def figures_of(best: Candidate, *, of: Sequence[Candidate] = CANDIDATES) -> dict[str, Any]:
    return {one.name: {"8": 90.0 if one == best else 60.0} for one in of}


class Children:
    """Stands in for the child processes that measure."""

    def __init__(self) -> None:
        self.asked: list[Measurement] = []
        self.scripts: list[str] = []
        """What each child runs; the last one again and again."""

    def say(self, best: Candidate, *, quiet: bool = True) -> str:
        line = json.dumps({"figures": figures_of(best), "quiet": quiet})
        return f"print({line!r})"

    def __call__(self, asked: Measurement) -> subprocess.Popen[str]:
        self.asked.append(asked)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        return subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    made = Children()
    monkeypatch.setattr(choose, "begin_child", made)
    return made


def asked_for(served: Manifest, wanted: Wanted = WANTED, *, store: str = "") -> Measurement:
    return Measurement(
        store=store,
        version=served.version,
        digest=served.digest,
        request=request_for(wanted, served),
    )


def measured(served: Manifest, wanted: Wanted = WANTED) -> MeasuredEngines:
    return Measuring(asked_for(served, wanted)).run()


@contextmanager
def choosing(store: Store, **settings: Any) -> Iterator[Live]:
    """A server that chooses its engine."""
    made = load_settings(store=store.location, device="cpu", threads=2, **settings)
    engine, auto = start_engine(made)
    with live_server(store.location, engine=engine, auto=auto, threads=2, **settings) as live:
        live.wait_until_ready()
        yield live


def engine_of(live: Live) -> str:
    said: str = live.http.get("/readyz").json()["engine"]
    return said


def test_the_server_chooses_unless_told_otherwise() -> None:
    assert load_settings().backend == "auto"


def test_the_fastest_over_all_loads_is_taken() -> None:
    figures = {TORCH.name: {"1": 40.0, "8": 50.0}, PLAIN.name: {"1": 30.0, "8": 90.0}}
    assert fastest(figures, CANDIDATES) == PLAIN


def test_of_two_that_are_equally_fast_the_more_exact_and_the_smaller_one_is_taken() -> None:
    rates = {PLAIN: 91.0, PACKED: 95.0, PLAIN_8: 100.0}
    figures = {one.name: {"8": rate} for one, rate in rates.items()}
    assert fastest(figures, CANDIDATES) == PLAIN
    assert fastest({**figures, PLAIN.name: {"8": 89.0}}, CANDIDATES) == PACKED
    assert fastest(figures, (TORCH, PLAIN_8)) == PLAIN_8


def test_a_candidate_that_lost_at_the_first_load_is_not_taken_for_it() -> None:
    figures = {TORCH.name: {"8": 70.0}, PLAIN.name: {"1": 40.0, "8": 90.0}}
    assert fastest(figures, CANDIDATES) == PLAIN


def test_single_precision_serves_until_engines_are_measured(store: Store, digits: Manifest) -> None:
    engine, auto = start_engine(load_settings(store=store.location, device="cpu"))
    assert engine.choice == "onnx fp32: safe until engines are measured"
    assert auto is not None
    assert auto.candidate == PLAIN
    assert start_engine(load_settings(store=store.location, backend="torch"))[1] is None


def test_a_choice_is_measured_once_for_a_shape_and_says_its_figures(
    letters: Manifest, children: Children
) -> None:
    children.scripts = [children.say(PACKED)]
    found = measured(letters)
    asked = asked_for(letters).request
    assert found.best(asked) == PACKED
    assert "torch fp32 60" in found.told
    assert "onnx fp32, packed weights 90" in found.told
    assert remembered(asked) == PACKED
    assert remembered(asked_for(letters, replace(WANTED, threads=4)).request) is None


def test_a_server_measures_switches_and_remembers(
    store: Store, digits: Manifest, children: Children
) -> None:
    children.scripts = [children.say(TORCH)]
    with choosing(store) as live:
        assert live.predict(png()).status_code == 200
        wait_for(
            lambda: engine_of(live).startswith("torch fp32: measured as the fastest; images/s")
        )
        ready = live.http.get("/readyz").json()
        assert (ready["backend"], ready["measuring"]) == ("torch", False)
        assert live.predict(png()).status_code == 200
        assert live.http.get("/v2/models/dne").json()["platform"] == "dne_torch"
        assert 'engine="torch fp32"' in live.http.get("/metrics").text
    with choosing(store) as live:
        assert engine_of(live) == "torch fp32: measured as the fastest at an earlier start"
    assert len(children.asked) == 1


def test_an_empty_store_is_measured_once_it_has_a_version(
    tmp_path: Path, store: Store, children: Children
) -> None:
    from tests.tiny_versions import promote, publish_tiny

    children.scripts = [children.say(TORCH)]
    made = load_settings(store=store.location, device="cpu", threads=2)
    engine, auto = start_engine(made)
    with live_server(store.location, engine=engine, auto=auto) as live:
        assert live.http.get("/readyz").status_code == 503
        promote(store, publish_tiny(store))
        live.wait_until_ready()
        wait_for(lambda: engine_of(live).startswith("torch fp32: measured"))


def test_a_candidate_that_kills_the_child_is_left_out_and_another_serves(
    store: Store, digits: Manifest, children: Children, caplog: pytest.LogCaptureFixture
) -> None:
    dies = (
        f"import os; print({json.dumps({'trying': PACKED.name})!r}, flush=True);"
        "os.write(2, b'Illegal \\x1b[31minstruction'); os.kill(os.getpid(), 4)"
    )
    children.scripts = [dies, children.say(TORCH)]
    with choosing(store) as live:
        wait_for(lambda: engine_of(live).startswith("torch fp32: measured"))
        assert engine_of(live).endswith("onnx fp32, packed weights did not run")
        assert live.predict(png()).status_code == 200
    assert [one.excluded for one in children.asked] == [(), (PACKED.name,)]
    assert "was ended by SIGILL: Illegal  [31minstruction" in caplog.text


def test_a_measurement_that_fails_says_why_and_is_tried_again(
    store: Store, digits: Manifest, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_switch, "AGAIN_S", 0.1)
    children.scripts = ["raise SystemExit('no version')", children.say(TORCH)]
    with choosing(store) as live:
        wait_for(lambda: engine_of(live).startswith("torch fp32: measured"))
    assert len(children.asked) == 2
    children.scripts = ["raise SystemExit('no version')"]
    assert measured(digits).fault == "the measurement ended with 1: no version"


def test_figures_of_a_busy_machine_are_not_kept_and_engines_are_measured_again(
    store: Store, digits: Manifest, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_switch, "AGAIN_S", 1.0)
    children.scripts = [children.say(TORCH, quiet=False), children.say(PACKED)]
    request = request_for(WANTED, digits)
    with choosing(store) as live:
        wait_for(lambda: engine_of(live).startswith("torch fp32: measured"))
        assert "beside other programs" in engine_of(live)
        assert remembered(request) is None
        wait_for(lambda: engine_of(live).startswith("onnx fp32, packed weights: measured"))
        assert "beside other programs" not in engine_of(live)


def test_a_server_that_stops_ends_its_measurement(
    store: Store, digits: Manifest, children: Children
) -> None:
    children.scripts = ["import time; time.sleep(600)"]
    with choosing(store) as live:
        wait_for(lambda: live.http.get("/readyz").json()["measuring"])
        assert live.predict(png()).status_code == 200


def test_a_measurement_that_is_stopped_while_its_child_starts_ends(
    letters: Manifest, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    children.scripts = ["import time; time.sleep(600)"]
    measuring = Measuring(asked_for(letters))

    def begin(asked: Measurement) -> subprocess.Popen[str]:
        measuring.stop()
        return children(asked)

    monkeypatch.setattr(choose, "begin_child", begin)
    assert measuring.run().figures == {}


def test_too_little_memory_is_said_and_nothing_is_measured(
    store: Store, digits: Manifest, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_switch, "available_bytes", lambda: 0)
    with choosing(store) as live:
        wait_for(lambda: "too little free memory" in engine_of(live))
        assert engine_of(live).startswith("onnx fp32: not measured")
    assert children.asked == []


@pytest.mark.parametrize("kept", [b"{", b"[]", b"[[[", b"5", b"\xff", b'{"a": 5}', b'["ab"]'])
def test_a_damaged_memory_costs_a_measurement(
    kept: bytes, tmp_path: Path, letters: Manifest, children: Children
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / REMEMBERED).write_bytes(kept)
    request = request_for(WANTED, letters)
    assert remembered(request) is None
    children.scripts = [children.say(PLAIN)]
    measured(letters)
    assert remembered(request) == PLAIN


@pytest.mark.parametrize("name", ["a command", 5, None, {"backend": "x"}])
def test_a_remembered_choice_is_a_candidate_or_nothing(
    name: object, tmp_path: Path, letters: Manifest, children: Children
) -> None:
    children.scripts = [children.say(PLAIN)]
    measured(letters)
    path = tmp_path / "cache" / REMEMBERED
    path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), name)))
    assert remembered(request_for(WANTED, letters)) is None


def test_reduced_precisions_are_measured_where_they_agree(letters: Manifest) -> None:
    whole = (PLAIN, PACKED, TORCH)
    assert candidates_for(WANTED, letters) == whole
    assert candidates_for(WANTED, agreeing(letters, 0.95)) == whole
    assert candidates_for(WANTED, agreeing(letters, 0.995)) == (*whole, PLAIN_8, PACKED_8)
    assert candidates_for(WANTED, agreeing(letters, 1.0, by="bf16")) == (*whole, TORCH_16)
    assert candidates_for(WANTED, None) == (PLAIN, TORCH)


def test_a_precision_that_was_asked_for_decides(letters: Manifest) -> None:
    asked = {
        one: candidates_for(replace(WANTED, precision=one), letters)
        for one in ("bf16", "int8", "fp32")
    }
    assert asked == {
        "bf16": (TORCH_16,),
        "int8": (PLAIN_8, PACKED_8),
        "fp32": (PLAIN, PACKED, TORCH),
    }


def test_weights_are_packed_only_where_there_is_room(letters: Manifest) -> None:
    little = replace(WANTED, room_bytes=4 * letters.spec.parameters)
    assert candidates_for(little, letters) == (PLAIN, TORCH)


def test_a_gpu_is_for_torch(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        "dne_serve.engine_start.choose_engine",
        lambda backend, **given: asked.append(f"{backend} {given['choice']}"),
    )
    for device in ("auto", "cuda"):
        assert start_engine(load_settings(store=store.location, device=device))[1] is None
    assert asked == 2 * ["torch torch: there is a GPU"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(WrongUsage, match="cuda"):
        start_engine(load_settings(store=store.location, device="cuda"))


def test_without_the_runtime_it_is_torch(
    store: Store, digits: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    engine, auto = start_engine(load_settings(store=store.location, device="cpu"))
    assert engine.backend == "torch"
    assert auto == Auto(
        wanted=replace(auto.wanted if auto else WANTED, threads=None), candidate=TORCH
    )


def test_the_version_cannot_be_read_and_decides_nothing(store: Store, letters: Manifest) -> None:
    assert served_by(None, channel="production") is None
    assert served_by(store, channel="elsewhere") is None
    assert served_by(store, channel="production") == letters
    Path(store.location, "versions", "00000001.json").write_text("{}")
    assert served_by(Store.open(store.location), channel="production") is None


def told_by_child(asked: Measurement, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    measure.main(asked.model_dump_json())
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_candidates_take_turns_at_every_load_until_they_have_lost(
    store: Store,
    digits: Manifest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "QUIET", 0.0)
    asked = asked_for(digits, store=store.location)
    lines = told_by_child(asked, capsys)
    assert [one["trying"] for one in lines[:3]] == [one.name for one in asked.request.candidates]
    assert lines[-1]["quiet"]
    rates = max(lines[-1]["figures"].values(), key=len)
    assert sorted(rates) == ["1", "32", "8"]
    assert min(rates.values()) > 0


def test_a_machine_that_stays_busy_is_told(
    store: Store,
    digits: Manifest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "_probe", lambda number: 0.5)
    monkeypatch.setattr(measure, "BUSY_S", 0.0)
    last = told_by_child(asked_for(digits, store=store.location), capsys)[-1]
    assert not last["quiet"]
    assert last["figures"]


def test_a_child_measures_no_other_version(store: Store, digits: Manifest) -> None:
    asked = asked_for(digits, store=store.location).model_copy(update={"digest": "0" * 64})
    with pytest.raises(SystemExit, match="is not the one that is served"):
        measure.main(asked.model_dump_json())


@pytest.mark.long
def test_measuring_on_request_prints_a_table_and_ends(
    store: Store, digits: Manifest, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--store", store.location, "--threads", "1", "--measure"]
    assert main(options) == 0
    out = capsys.readouterr().out
    assert "onnx fp32" in out
    assert "is the fastest for version" in out
    assert main([*options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["engine"] in told["figures"]


def test_measuring_on_request_needs_a_version(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--store", store.location, "--measure"]) == 2
    assert "names no version" in capsys.readouterr().err


@pytest.mark.long
def test_a_server_says_which_engine_it_took_and_why(store: Store, digits: Manifest) -> None:
    with running("--store", store.location, "--backend", "auto", "--device", "cpu") as (_, url):
        wait_for(
            lambda: ": measured as the fastest" in httpx.get(f"{url}/readyz").json()["engine"],
            seconds=120,
        )
        ready = httpx.get(f"{url}/readyz").json()
        assert ready["engine"].startswith(ready["backend"])


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
