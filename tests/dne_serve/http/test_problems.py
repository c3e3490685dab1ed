"""Every refusal has an id, and nothing of this machine's insides; the log has the rest."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import httpx
import pytest

from dne_serve.errors import public_message
from dne_serve.http import middleware
from dne_serve.http.problems import Note, answer_to
from model_store import errors
from tests.live_server import TOKEN, Live, assert_problem, png

INSIDES = re.compile(
    r"Traceback|File \"|\.py\b|0x[0-9a-f]{6}|site-packages|/(?:tmp|home|root|usr|work)/"
)


def every_error(of: type[errors.DneError] = errors.DneError) -> list[type[errors.DneError]]:
    return [of, *(deep for kind in of.__subclasses__() for deep in every_error(kind))]


def logged(caplog: pytest.LogCaptureFixture, answer: httpx.Response) -> str:
    """The one line that has the id of this answer."""
    instance = answer.json()["instance"]
    [line] = [record.getMessage() for record in caplog.records if instance in record.getMessage()]
    return line


def test_every_error_of_the_store_has_a_status_of_its_own_choosing() -> None:
    """500 is for what nobody foresaw."""
    kinds = [kind for kind in every_error(errors.StoreError) if kind.__module__ == errors.__name__]
    assert len(kinds) > 10
    for kind in kinds:
        assert answer_to(kind.__new__(kind)).status != 500, kind


def test_where_the_store_is_stays_here() -> None:
    said = public_message(errors.StoreError("/srv/models/x could not be read: Permission denied"))
    assert "/srv" not in said
    assert "/srv" not in public_message(errors.StoreNotFound("there is no store at /srv/models"))
    unreachable = errors.ShardUnreachable("0" * 64, ["there is no store at /srv/shared"])
    assert "/srv" not in public_message(unreachable)


def test_each_answer_has_an_id_of_its_own_and_its_line_in_the_log(
    steady: Live, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    header = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    answers = [
        steady.http.get("/nowhere"),
        steady.http.get("/versions/77"),
        steady.http.get("/predict"),
        steady.http.post("/predict", content=b"x", headers={"Content-Type": "text/plain"}),
        steady.predict(b"not an image"),
        steady.http.post("/rollback", content=b"{", headers=header),
        steady.http.post("/rollback"),
        steady.http.get("/healthz", headers={"Host": "evil.example"}),
    ]
    for answer in answers:
        assert_problem(answer, answer.status_code)
        assert str(answer.status_code) in logged(caplog, answer)
        assert not INSIDES.search(answer.text)
    assert len({answer.json()["instance"] for answer in answers}) == len(answers)


def test_the_log_says_what_the_decoder_said(steady: Live, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    answer = steady.predict(png()[:60], names="a\nforged line.png")
    assert_problem(answer, 422)
    line = logged(caplog, answer)
    assert "because of" in line
    assert "\n" not in line


def test_a_refusal_has_no_stack_trace_in_the_log_and_a_fault_has(
    live: Live, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    live.predict(b"not an image")
    assert "Traceback" not in caplog.text

    def fail() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/secret/path")

    monkeypatch.setattr(live.serving, "open_store", fail)
    answer = live.http.get("/versions")
    assert_problem(answer, 500)
    assert not INSIDES.search(answer.text)
    assert "secret" not in answer.text
    assert "Traceback" in caplog.text
    assert answer.json()["instance"] in caplog.text


def test_a_store_that_cannot_be_read_is_503_without_its_place(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise errors.StoreError("/secret/path could not be read: Permission denied")

    monkeypatch.setattr(live.serving, "open_store", fail)
    answer = live.http.get("/versions")
    assert_problem(answer, 503, says="log says why")
    assert "secret" not in answer.text


@pytest.mark.parametrize("where", ["field", "path", "type", "part"])
def test_what_a_client_sends_comes_back_cut_short(steady: Live, where: str) -> None:
    long = "x" * 20_000
    header = {"Authorization": f"Bearer {TOKEN}"}
    answer = {
        "field": lambda: steady.http.post("/rollback", json={long: 1}, headers=header),
        "path": lambda: steady.http.get(f"/{long}"),
        "type": lambda: steady.http.post("/predict", content=b"x", headers={"Content-Type": long}),
        "part": lambda: steady.http.post("/predict", files={long: png()}),
    }[where]()
    assert 400 <= answer.status_code < 500
    assert len(answer.content) < 3000


def test_a_long_file_name_is_refused_or_comes_back(steady: Live, tmp_path: Path) -> None:
    answer = steady.http.post("/predict", files=[("files", ("n" * 200 + ".png", png()))])
    assert answer.status_code == 200
    answer = steady.http.post("/predict", files=[("files", ("n" * 1_000_000 + ".png", png()))])
    assert_problem(answer, 400)
    assert len(answer.content) < 3000


def test_a_refusal_holds_its_body_no_longer_than_the_request(
    steady: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traceback of a cause holds the body, and a note lives as long as its connection."""
    notes: list[Note] = []
    causes: list[BaseException | None] = []

    def noted() -> Note:
        notes.append(Note())
        return notes[-1]

    def log_line(*_: object, **__: object) -> None:
        causes.append(notes[-1].cause)

    monkeypatch.setattr(middleware, "Note", noted)
    monkeypatch.setattr(middleware, "_tell", log_line)
    assert steady.http.post("/v2/models/dne/infer", content=b" " * 100_000).status_code == 400
    assert [type(cause).__name__ for cause in causes] == ["ValidationError"]
    assert [note.cause for note in notes] == [None]
