"""Random text in every place that a client controls. A short form is in
tests/dne_serve/test_log_lines.py."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.abuse.victim import Client, serving
from tests.campaigns import AddRow
from tests.dne_serve.test_log_lines import BREAKS, FORGED, RECORD
from tests.live_server import TOKEN, png

SEED = 11
REQUESTS = 6000
ACTION = re.compile(r"(POST /(rollback|promote|resume|v2/[\w/{}]+)|refused requests .*)")
AUDIT_LINE = f'{{"time": "x", "action": "{FORGED}"}}'
PARTS = [*BREAKS, "\x1b[2J", "\x00", "\t", "\u202e", "\ud800", "é", "图", '"', "\\", "'", "%0a"]
PARTS += ["\\n", "{}", "%s", "&", "=", "/", "..", FORGED, AUDIT_LINE, "x" * 300]
HOST = "Host: localhost\r\n"


def text(dice: random.Random) -> str:
    return "".join(dice.choices(PARTS, k=dice.randint(1, 8)))


def raw(words: str) -> bytes:
    return words.encode("utf-8", "surrogatepass")


def quoted(words: str) -> bytes:
    return b"".join(b"%%%02x" % byte for byte in raw(words))


def request(line: bytes, *, headers: bytes = b"", body: bytes = b"") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body)
    return line + b" HTTP/1.1\r\n" + HOST.encode() + headers + length + b"\r\n" + body


def posted(path: bytes, value: object, *, token: str = TOKEN) -> bytes:
    headers = b"Content-Type: application/json\r\nAuthorization: Bearer %s\r\n" % token.encode()
    return request(b"POST " + path, headers=headers, body=json.dumps(value).encode())


def form(filename: bytes, *, field: bytes = b"files") -> bytes:
    disposition = b'Content-Disposition: form-data; name="%s"; filename="%s"' % (field, filename)
    body = b"--edge\r\n" + disposition + b"\r\n\r\n" + png()[:60] + b"\r\n--edge--\r\n"
    kind = b"Content-Type: multipart/form-data; boundary=edge\r\n"
    return request(b"POST /predict", headers=kind, body=body)


PLACES: dict[str, Callable[[str], bytes]] = {
    "method": lambda said: request(raw(said) + b" /healthz"),
    "path": lambda said: request(b"GET /" + quoted(said)),
    "raw path": lambda said: request(b"GET /" + raw(said)),
    "path of an admin route": lambda said: request(
        b"POST /v2/repository/models/%s/load" % quoted(said)
    ),
    "query": lambda said: request(b"POST /predict?version=" + quoted(said)),
    "host": lambda said: b"GET /healthz HTTP/1.1\r\nHost: " + raw(said) + b"\r\n\r\n",
    "origin": lambda said: request(b"GET /healthz", headers=b"Origin: " + raw(said) + b"\r\n"),
    "content type": lambda said: request(
        b"POST /predict", headers=b"Content-Type: " + raw(said) + b"\r\n", body=b"x"
    ),
    "coding": lambda said: request(
        b"POST /predict", headers=b"Content-Encoding: " + raw(said) + b"\r\n", body=b"x"
    ),
    "accept": lambda said: request(
        b"POST /predict", headers=b"Accept: " + raw(said) + b"\r\n", body=b"x"
    ),
    "token": lambda said: request(
        b"POST /rollback", headers=b"Authorization: Bearer " + raw(said) + b"\r\n"
    ),
    "filename": lambda said: form(raw(said)),
    "form field": lambda said: form(b"x", field=raw(said)),
    "JSON key": lambda said: posted(b"/predict", {"images": [], said: 1}),
    "nested JSON key": lambda said: posted(b"/predict", {"images": [{"data": "x", said: 1}]}),
    "JSON value": lambda said: posted(b"/predict", {"images": [said]}),
    "JSON filename": lambda said: posted(
        b"/predict", {"images": [{"data": "eA==", "filename": said}]}
    ),
    "key of a move": lambda said: posted(b"/rollback", {said: 1}),
    "reason": lambda said: posted(b"/rollback", {"to": 99, "reason": said}),
    "tensor": lambda said: posted(b"/v2/models/dne/infer", {"inputs": [{"name": said, said: 1}]}),
    "model": lambda said: request(b"GET /v2/models/" + quoted(said)),
    "trailer": lambda said: (
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"1\r\nx\r\n0\r\nX: " + raw(said) + b"\r\n\r\n"
    ),
    "chunk size": lambda said: (
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        + raw(said)
        + b"\r\n"
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_line_is_a_record_that_the_server_wrote(
    models: Path, tmp_path: Path, abuse_row: AddRow
) -> None:
    dice, audit = random.Random(SEED), tmp_path / "audit"
    places = list(PLACES.values())
    arguments = ["--store", str(models), "--log-level", "debug", "--audit-log", str(audit)]
    limits = {"header_seconds": 1.0, "body_seconds": 1.0}
    with serving(*arguments, environment={"DNE_ADMIN_TOKEN": TOKEN}, limits=limits) as victim:
        statuses: set[int] = set()
        with Client(victim) as client:
            for number in range(REQUESTS):
                said = text(dice)
                try:
                    statuses.add(client.send(places[number % len(places)](said)).status)
                except OSError:
                    client.close()
        assert victim.is_alive()
        lines = victim.log.read_bytes().decode().split("\n")[:-1]
    strange = [line for line in lines if not RECORD.fullmatch(line)]
    assert strange == []
    assert [line for line in lines if line.startswith(FORGED) or len(line.splitlines()) != 1] == []
    noted = [json.loads(line) for line in audit.read_bytes().decode().split("\n")[:-1]]
    assert [one for one in noted if not ACTION.fullmatch(one["action"])] == []
    assert {status for status in statuses if status >= 500} <= {501, 505}
    abuse_row(
        "log lines",
        f"seed {SEED}: {REQUESTS:,} requests, random text in {len(PLACES)} places",
        f"{len(lines):,} lines of the log and {len(noted):,} of the audit log, each one record "
        "that the server wrote",
    )
