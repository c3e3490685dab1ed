"""Write the SHA-256 of every file of every pinned distribution, for pip to check: `make lock`.

`requirements.lock` has all pins of constraints.txt; `deploy/image.lock` those that a server with
onnxruntime and S3 needs, `deploy/build.lock` hatchling, which builds it, and its needs. uv knows
the hashes from the package index that it is set up with. A build of torch that comes from
elsewhere, such as one without CUDA libraries, is what pip would take here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[1]
LOCK = PROJECT / "requirements.lock"
IMAGE_LOCK = PROJECT / "deploy/image.lock"
BUILD_LOCK = PROJECT / "deploy/build.lock"
IMAGE_EXTRAS = ("onnx", "s3")
TORCH_LOCK = PROJECT / "deploy/torch.lock"
"""torch alone, for an installation that may see one file only."""
TOOLS_LOCK = PROJECT / "deploy/tools.lock"
UV = str(Path(sys.executable).with_name("uv"))
UV_OPTIONS = ("--generate-hashes", "--no-header", "--no-annotate", "--no-config", "--quiet")
OWN_BUILDS = ("torch",)
ONLY_FOR = re.compile(r"# Only for the extra (\w+):")
"""Begins the part of constraints.txt that one extra alone needs. `make` does not install it."""
HEADER = "# Made by `make lock` from constraints.txt; not to be edited.\n"


def main() -> int:
    pins = read_pins(PROJECT / "constraints.txt")
    hashes = published_hashes(pins)
    for name in OWN_BUILDS:
        hashes[name] |= {hash_chosen_here(f"{name}=={pins[name]}")}
    bare = [name for name in pins if not hashes.get(name)]
    if bare:
        print(f"the index has no hash of {', '.join(bare)}", file=sys.stderr)
        return 1
    LOCK.write_text(HEADER + lines_of(pins, hashes))
    TORCH_LOCK.write_text(HEADER + lines_of({"torch": pins["torch"]}, hashes))
    needed = closure("dne-serve", extras=IMAGE_EXTRAS)
    image = {name: pin for name, pin in pins.items() if name in needed}
    IMAGE_LOCK.write_text(HEADER + lines_of(image, hashes))
    builder = closure("hatchling") | {"hatchling"}
    BUILD_LOCK.write_text(
        HEADER + lines_of({name: pin for name, pin in pins.items() if name in builder}, hashes)
    )
    lock_tools()
    print(f"{len(pins)} distributions in {LOCK.name}, {len(image)} in {IMAGE_LOCK.name}")
    return 0


def lock_tools() -> None:
    """Choose the newest tools that deploy/tools.in allows, and write all they need with hashes."""
    command = [UV, "pip", "compile", "deploy/tools.in", "--upgrade", "--universal"]
    text = run([*command, *UV_OPTIONS])  # universal: keeps the platforms that a tool is for
    TOOLS_LOCK.write_text(HEADER.replace("constraints.txt", "deploy/tools.in") + text)


def read_pins(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def read_apart(path: Path) -> dict[str, str]:
    """Read the pins that one extra alone needs, each with the marker that leaves it out."""
    found, extra = {}, ""
    for line in path.read_text().splitlines():
        if heading := ONLY_FOR.match(line):
            extra = heading[1]
        elif extra and "==" in line:
            found[line.partition("==")[0]] = f"extra == '{extra}'"
    return found


APART = read_apart(PROJECT / "constraints.txt")


def read_lock(path: Path) -> dict[str, str]:
    """Read the pins of a lock file."""
    return dict(re.findall(r"^([a-z0-9-]+)==([^ ;]+)", path.read_text(), re.MULTILINE))


def published_hashes(pins: Mapping[str, str]) -> dict[str, set[str]]:
    """Ask the index for the hashes of all files of each pin."""
    asked = "\n".join(f"{name}=={pin}" for name, pin in pins.items())
    found = run([UV, "pip", "compile", "-", "--no-deps", *UV_OPTIONS], given=asked)
    hashes: dict[str, set[str]] = {}
    for block in re.split(r"\n(?=\S)", found):
        hashes[canonicalize_name(block.partition("==")[0])] = set(
            re.findall(r"sha256:[0-9a-f]{64}", block)
        )
    return hashes


def hash_chosen_here(requirement: str) -> str:
    """Ask pip which file it would install on this machine."""
    report = run(
        [
            str(PROJECT / ".venv/bin/python"), "-m", "pip", "install", "--quiet", "--dry-run",
            "--no-deps", "--ignore-installed", "--report", "-", requirement,
        ]
    )  # fmt: skip
    [chosen] = json.loads(report)["install"]
    return f"sha256:{chosen['download_info']['archive_info']['hashes']['sha256']}"


def closure(name: str, *, extras: Iterable[str] = ()) -> set[str]:
    """Find what a distribution needs on this machine, by the environment of the project."""
    [installed] = PROJECT.glob(".venv/lib/python*/site-packages")
    needs: dict[str, list[Requirement]] = {
        canonicalize_name(one.metadata["Name"]): [Requirement(text) for text in one.requires or ()]
        for one in distributions(path=[str(installed)])
    }
    found: set[str] = set()
    waiting = [(name, frozenset(extras))]
    while waiting:
        one, wanted = waiting.pop()
        for need in needs[one]:
            marker, key = need.marker, canonicalize_name(need.name)
            applies = marker is None or any(marker.evaluate({"extra": e}) for e in wanted | {""})
            if applies and key not in found:
                found.add(key)
                waiting.append((key, frozenset(need.extras)))
    return found


def lines_of(pins: Mapping[str, str], hashes: Mapping[str, set[str]]) -> str:
    return "".join(
        f"{name}=={pin}{f' ; {APART[name]}' if name in APART else ''} \\\n"
        + " \\\n".join(f"    --hash={one}" for one in sorted(hashes[name]))
        + "\n"
        for name, pin in sorted(pins.items())
    )


def run(command: list[str], *, given: str | None = None) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, cwd=PROJECT)
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} … failed:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
