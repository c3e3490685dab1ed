"""Names that lead elsewhere: versions, classes, models, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.abuse.victim import Client, Victim
from tests.campaigns import AddRow
from tests.live_server import png

NAMES = (
    "../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/etc/passwd",
    "....//....//etc/passwd",
    "..%252f..%252fetc%252fpasswd",
    "..%5c..%5cetc%5cpasswd",
    "/etc/passwd",
    "//etc/passwd",
    "%00",
    "1%00.json",
    "1/../2",
    "1;2",
    "1%0d%0aX-Made-Up:%20yes",
    "00000001.json",
    "-1",
    "0",
    "1e0",
    "0x1",
    "１",
    "9" * 400,
    "store.json",
    "CON",
    "~root",
    "$HOME",
    "file:///etc/passwd",
)
FOLDERS = (
    "/versions/",
    "/classes?version=",
    "/classes/",
    "/console/",
    "/v2/models/",
    "/v2/models/dne/versions/",
    "/",
)
LEAKS = (b"root:x:", b'"transaction"', b'"format":1', b"def ", b"import ")


def unquoted(name: str) -> str:
    return name.encode("utf-8").decode("latin-1").replace(" ", "%20")


def test_no_name_leads_out_of_what_is_served(victim: Victim, abuse_row: AddRow) -> None:
    tried = 0
    with Client(victim) as client:
        for folder in FOLDERS:
            for name in NAMES:
                answer = client.get(folder + unquoted(name))
                assert 400 <= answer.status < 500, (folder, name, answer)
                assert not any(leak in answer.body for leak in LEAKS), (folder, name, answer)
                tried += 1
        for name in NAMES:
            target = f"/predict?version={unquoted(name)}"
            head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
            image = png()
            request = f"{head}Content-Length: {len(image)}\r\n\r\n".encode("latin-1") + image
            assert client.send(request).status in (400, 404), name
            tried += 1
    abuse_row("traversal", f"{tried} names in paths and queries", "all 4xx, nothing leaked")


@pytest.mark.parametrize("name", ["../../x.png", "/etc/x.png", "a\\..\\b.png", "x" * 3000, "nul\0"])
def test_the_name_of_a_file_names_no_file(victim: Victim, models: Path, name: str) -> None:
    before = set(models.rglob("*"))
    body = json.dumps({"images": [{"data": "bm90IGFuIGltYWdl", "filename": name}]}).encode()
    with Client(victim) as client:
        answer = client.predict(body, kind="application/json")
    assert answer.status == 422
    assert set(models.rglob("*")) == before
