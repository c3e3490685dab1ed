"""axe-core, the rules of accessibility that browsers' makers use: never part of the repository.

`make test SUITE=pages` fetches it. `python -m tests.e2e.axe ARCHIVE` checks and unpacks what npm
fetched.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

VERSION = "4.14.0"
INTEGRITY = (
    "9WTZxEjsZ7b13TH8JPmbV2z8CHbl80/2hm3XPEG4JgNdQLK81IBRXmSxHfMAOkSqQeRxT/0dwNDz2GOm3zzpcQ=="
)
"""SHA-512 of the archive, as npm writes it."""
SCRIPT = Path(__file__).resolve().parents[2] / ".tools/axe" / f"axe-{VERSION}.min.js"


def unpack(archive: Path) -> None:
    """Check the archive and take the one script out of it."""
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != INTEGRITY:
        raise SystemExit(f"{archive} is not axe-core {VERSION}: its SHA-512 is {found}")
    with tarfile.open(archive) as files:
        script = files.extractfile("package/axe.min.js")
        assert script is not None
        SCRIPT.parent.mkdir(parents=True, exist_ok=True)
        SCRIPT.write_bytes(script.read())


def violations(page: Page) -> list[str]:
    """Run all rules of axe's default on the page as it is now, and tell what each of them found.
    The script is handed over by the debugger, so the page keeps its policy."""
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate(SCRIPT.read_text(encoding="utf-8"))
    found: dict[str, Any] = page.evaluate("axe.run({ resultTypes: ['violations'] })")
    return [
        f"{one['id']} ({one['impact']}): {node['html'][:160]} | {node['failureSummary']!r:.300}"
        for one in found["violations"]
        for node in one["nodes"]
    ]


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
