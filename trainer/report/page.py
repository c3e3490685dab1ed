"""Write a report as one HTML file: the server's page with facts, pictures, script and style inside.

The files of the page are read; nothing of the server is imported. The written file needs no
network: its policy allows the script and the style inside, by their digests, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib import resources
from typing import Any

from model_store.errors import ImageRejected, StoreError
from model_store.records.manifest import Manifest
from model_store.report.pictures import read_picture_of
from model_store.report.record import VersionReport
from model_store.store.store import Store

FILES = resources.files("dne_serve") / "console"
STYLES = ("style.css", "report.css")
SCRIPTS = (
    "ask.js",
    "elements.js",
    "plots.js",
    "report_pictures.js",
    "report_parts.js",
    "report.js",
)
"""One after the other they are one script: each stands below those that it imports."""
ONLY_SERVED = re.compile(r"<!-- only served -->.*?<!-- / -->\n", re.DOTALL)
IMPORT = re.compile(r"^import .*;\n", re.MULTILINE)
EXPORT = re.compile(r"^export ", re.MULTILINE)


def page(facts: dict[str, Any]) -> str:
    """Write the page. A name may be any text: none of it is ever markup."""
    style = "".join(_read(name) for name in STYLES)
    script = "".join(EXPORT.sub("", IMPORT.sub("", _read(name))) for name in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    data = json.dumps(facts, allow_nan=False).replace("<", "\\u003c")
    tail = (
        f'<script id="facts" type="application/json">{data}</script>\n'
        f'<script type="module">{script}</script>\n'
    )
    html = ONLY_SERVED.sub("", _read("report.html"))
    html = html.replace("<title>", f"{head}<title>", 1)
    html = html.replace("</head>", f"<style>{style}</style>\n</head>", 1)
    return html.replace("</body>", f"{tail}</body>", 1)


def facts_of_page(
    store: Store, manifest: Manifest, report: VersionReport, **more: Any
) -> dict[str, Any]:
    """Put pictures and further facts beside those that a server tells."""
    facts = report.model_dump(mode="json", by_alias=True)
    for picture in facts["pictures"]:
        picture["src"] = _picture(store, manifest, picture["number"])
    return {**facts, **more}


def _picture(store: Store, manifest: Manifest, number: int) -> str | None:
    try:
        thumbnail = read_picture_of(store, manifest, number)
    except (StoreError, ImageRejected):
        return None
    return f"data:{thumbnail.type};base64,{base64.b64encode(thumbnail.data).decode()}"


def _read(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
