"""Look up known vulnerabilities of every pinned distribution: `make audit`.

Without `--advisories` pip-audit asks the package index. With it nothing asks the network: FILE is
an export of the OSV database for PyPI, a folder or a zip of JSON files. Ends with 0 where every
pin was looked up and none is vulnerable, with 1 where one is, and with 2 where a pin could not be
looked up: an audit that asked nobody is not a clean one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lock import APART, LOCK, read_lock
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

CLEAN, VULNERABLE, NOT_ASKED = 0, 1, 2


def main() -> int:
    parser = argparse.ArgumentParser(description="Look up known vulnerabilities of every pin.")
    parser.add_argument("--advisories", type=Path, metavar="FILE", help="an export of OSV for PyPI")
    parser.add_argument("--lock", type=Path, default=LOCK, help="the pins (requirements.lock)")
    given = parser.parse_args()
    pins = read_lock(given.lock)
    try:
        found = offline(pins, given.advisories) if given.advisories else online(given.lock, pins)
    except NotAsked as error:
        print(f"NOT AUDITED: {error}", file=sys.stderr)
        return NOT_ASKED
    for line in found:
        print(line)
    print(f"{len(pins)} distributions were looked up, {len(found)} vulnerabilities are known")
    return VULNERABLE if found else CLEAN


class NotAsked(Exception):
    """The database could not be asked about every pin."""


def online(lock: Path, pins: Mapping[str, str]) -> list[str]:
    """Ask the package index, through pip-audit."""
    command = [str(Path(sys.executable).with_name("pip-audit")), "--requirement", str(lock)]
    options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    try:
        done = subprocess.run([*command, *options], capture_output=True, text=True)
    except OSError as error:
        raise NotAsked(f"pip-audit cannot be run ({error}): use `make audit`") from error
    try:
        listed = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError) as error:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise NotAsked(f"pip-audit failed: {last}; try --advisories FILE") from error
    return read_report(listed, pins)


def read_report(listed: list[dict[str, Any]], pins: Mapping[str, str]) -> list[str]:
    """Read what pip-audit found. It passes over what the index does not know, and ends with 0."""
    asked = {canonicalize_name(one["name"]) for one in listed if "skip_reason" not in one}
    # Pins of other machines are left out by their markers.
    missing = sorted(set(pins) - asked - set(APART))
    if missing:
        raise NotAsked(
            f"the index has no advisories for {len(missing)} of {len(pins)} distributions "
            f"({', '.join(missing[:3])}, …): use an index that has them, or --advisories FILE"
        )
    return [
        f"{one['name']} {one['version']}: {found['id']}, "
        f"fixed in {', '.join(found['fix_versions']) or 'no release'}"
        for one in listed
        for found in one.get("vulns", ())
    ]


def offline(pins: Mapping[str, str], advisories: Path) -> list[str]:
    """Compare the pins with an export of the OSV database."""
    found, read = [], 0
    for advisory in _advisories(advisories):
        read += 1
        if "withdrawn" in advisory:
            continue
        found += [
            f"{name} {pins[name]}: {advisory['id']} {advisory.get('summary', '')}".rstrip()
            for name, affected in _affected(advisory)
            if name in pins and _is_hit(Version(pins[name]), affected)
        ]
    if not read:
        raise NotAsked(f"{advisories} holds no advisory: give OSV's JSON files as a folder or zip")
    return found


def _advisories(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_dir():
        yield from (json.loads(file.read_bytes()) for file in sorted(path.rglob("*.json")))
        return
    try:
        with zipfile.ZipFile(path) as archive:
            yield from (
                json.loads(archive.read(name))
                for name in archive.namelist()
                if name.endswith(".json")
            )
    except (OSError, zipfile.BadZipFile) as error:
        raise NotAsked(f"{path} cannot be read: {error}") from error


def _affected(advisory: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for affected in advisory.get("affected", ()):
        package = affected.get("package", {})
        if package.get("ecosystem") == "PyPI":
            yield canonicalize_name(package["name"]), affected


def _is_hit(pin: Version, affected: Mapping[str, Any]) -> bool:
    if any(pin == _version(text) for text in affected.get("versions", ())):
        return True
    ranges = [one for one in affected.get("ranges", ()) if one.get("type") == "ECOSYSTEM"]
    return any(_is_within(pin, one["events"]) for one in ranges)


def _is_within(pin: Version, events: list[dict[str, str]]) -> bool:
    """Follow the events of a range, in the order of their versions, up to the pin."""
    hit = False
    for event in sorted(events, key=lambda event: _version(next(iter(event.values())))):
        [(kind, text)] = event.items()
        at = _version(text)
        if kind == "introduced" and pin >= at:
            hit = True
        elif (kind == "fixed" and pin >= at) or (kind == "last_affected" and pin > at):
            hit = False
    return hit


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:  # ancient releases: older than anything that is pinned
        return Version("0")


if __name__ == "__main__":
    sys.exit(main())
