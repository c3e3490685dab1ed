"""Check that a CycloneDX document names every distribution that is pinned for this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lock import APART, LOCK, read_lock
from packaging.utils import canonicalize_name


def main(path: str) -> int:
    document = json.loads(Path(path).read_text())
    named: dict[str, str] = {
        canonicalize_name(one["name"]): one.get("version", "").partition("+")[0]
        for one in document.get("components", ())
    }
    pins = {name: pin for name, pin in read_lock(LOCK).items() if name not in APART}
    missing = [name for name, pin in pins.items() if named.get(name) != pin]
    if document.get("bomFormat") != "CycloneDX" or missing:
        print(f"{path} is not complete: it lacks {', '.join(missing) or 'its format'}")
        return 1
    print(f"{path}: CycloneDX {document['specVersion']}, {len(named)} components")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
