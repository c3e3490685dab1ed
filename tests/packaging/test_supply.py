"""What is installed is what was looked at: floors, pins, hashes, advisories, materials."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.packaging.project import ROOT, pyproject

KNOWN_FIXES = {
    "aiohttp": "3.13.3",  # CVE-2025-69223
    "cryptography": "46.0.5",  # CVE-2026-26007
    "flask": "3.1.3",  # CVE-2026-27205
    "h11": "0.16.0",  # CVE-2025-43859
    "jinja2": "3.1.6",  # CVE-2025-27516
    "onnx": "1.21.0",  # CVE-2026-34445, CVE-2026-27489
    "pillow": "12.1.1",  # CVE-2026-25990
    "python-multipart": "0.0.31",  # CVE-2026-42561, GHSA-v9pg-7xvm-68hf
    "requests": "2.32.4",  # CVE-2024-47081
    "starlette": "0.49.1",  # CVE-2025-62727
    "torch": "2.10.0",  # CVE-2025-32434, CVE-2026-24747
    "urllib3": "2.6.3",  # CVE-2026-21441
}
"""The oldest releases that are not known to be vulnerable, of what we or our tests use."""

PILLOW = {
    "id": "MADE-UP-1",
    "affected": [
        {
            "package": {"ecosystem": "PyPI", "name": "Pillow"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "13.0.1"}]}],
        }
    ],
}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def locked(path: str) -> dict[str, tuple[str, set[str]]]:
    """Version and hashes of every distribution in a lock file."""
    blocks = re.split(r"\n(?=[a-z0-9])", (ROOT / path).read_text())
    found = {}
    for block in blocks:
        if one := re.match(r"([a-z0-9._-]+)==([^ ;]+)", block):
            found[one[1]] = (one[2], set(re.findall(r"--hash=sha256:([0-9a-f]{64})\b", block)))
    return found


def requirements() -> list[Requirement]:
    project = pyproject()["project"]
    optional = [one for extra in project["optional-dependencies"].values() for one in extra]
    return [Requirement(one) for one in (*project["dependencies"], *optional)]


def floor_of(requirement: Requirement) -> Version:
    [floor] = [one.version for one in requirement.specifier if one.operator == ">="]
    return Version(floor)


def test_every_pin_has_a_hash_and_nothing_else_is_locked() -> None:
    found = locked("requirements.lock")
    assert {name: version for name, (version, _) in found.items()} == pins()
    assert [name for name, (_, hashes) in found.items() if not hashes] == []


def test_the_image_installs_a_part_of_the_same_lock() -> None:
    everything, image = locked("requirements.lock"), locked("deploy/image.lock")
    assert [name for name, one in image.items() if everything.get(name) != one] == []
    direct = [Requirement(one).name for one in pyproject()["project"]["dependencies"]]
    assert {*direct, "onnxruntime", "obstore"} <= image.keys()
    assert not {"pytest", "moto", "onnxruntime-gpu", "hatchling"} & image.keys()
    builder = locked("deploy/build.lock")
    assert [name for name, one in builder.items() if everything.get(name) != one] == []
    assert "hatchling" in builder


def test_torch_is_checked_before_the_rest_and_from_one_folder() -> None:
    """Beside an index pip passes over a wheel in a folder, whose address has no hash."""
    assert locked("deploy/torch.lock") == {"torch": locked("requirements.lock")["torch"]}
    recipe = (ROOT / "Makefile").read_text().partition("\n$(READY):")[2]
    steps = [line for line in recipe.splitlines() if " -r " in line]
    assert "--no-index --find-links .venv/torch -r deploy/torch.lock" in steps[0]
    assert steps[1].endswith("--require-hashes --no-deps -r requirements.lock")


def test_the_tools_are_locked_too() -> None:
    tools = locked("deploy/tools.lock")
    asked = [line for line in (ROOT / "deploy/tools.in").read_text().splitlines() if line[0] != "#"]
    assert {Requirement(one).name for one in asked} <= tools.keys()
    assert [name for name, (_, hashes) in tools.items() if not hashes] == []


def test_no_floor_is_above_its_pin() -> None:
    found = pins()
    assert [str(one) for one in requirements() if floor_of(one) > Version(found[one.name])] == []


def test_no_floor_and_no_pin_is_below_a_known_fix() -> None:
    found = pins()
    fixes = {name: Version(fix) for name, fix in KNOWN_FIXES.items()}
    assert [name for name, fix in fixes.items() if Version(found[name]) < fix] == []
    assert [
        str(one) for one in requirements() if one.name in fixes and floor_of(one) < fixes[one.name]
    ] == []


def test_what_is_imported_of_a_library_is_required_by_name() -> None:
    """Starlette came with FastAPI only, and so without a floor of ours."""
    direct = {Requirement(one).name for one in pyproject()["project"]["dependencies"]}
    assert "starlette" in direct


def audit(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "deploy/audit.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def export(folder: Path, *advisories: dict[str, Any]) -> Path:
    for number, advisory in enumerate(advisories):
        (folder / f"{number}.json").write_text(json.dumps(advisory))
    return folder


def with_events(*events: dict[str, str]) -> dict[str, Any]:
    affected = {**PILLOW["affected"][0], "ranges": [{"type": "ECOSYSTEM", "events": [*events]}]}  # type: ignore[dict-item]
    return {**PILLOW, "affected": [affected]}


def test_a_vulnerable_pin_is_named_and_the_audit_ends_with_1(tmp_path: Path) -> None:
    done = audit("--advisories", str(export(tmp_path, PILLOW)))
    assert done.returncode == 1, done.stderr
    assert f"pillow {pins()['pillow']}: MADE-UP-1" in done.stdout
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(tmp_path / "0.json", "0.json")
    assert audit("--advisories", str(tmp_path / "all.zip")).returncode == 1


@pytest.mark.parametrize(
    "advisory",
    [
        with_events({"introduced": "0"}, {"fixed": "13.0.0"}),
        with_events({"introduced": "13.0.1"}),
        with_events({"introduced": "0"}, {"last_affected": "12.9"}),
        {**PILLOW, "withdrawn": "2026-01-01T00:00:00Z"},
    ],
)
def test_a_pin_that_no_advisory_is_about_ends_with_0(
    tmp_path: Path, advisory: dict[str, Any]
) -> None:
    done = audit("--advisories", str(export(tmp_path, advisory)))
    assert done.returncode == 0, done.stdout
    assert "0 vulnerabilities" in done.stdout


def test_an_audit_that_asked_nobody_is_not_clean(tmp_path: Path) -> None:
    for arguments in (["--advisories", str(tmp_path)], ["--advisories", str(tmp_path / "none")]):
        done = audit(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("NOT AUDITED: ")


def test_what_the_index_has_no_advisories_for_is_told() -> None:
    """pip-audit itself skips such distributions and ends with 0."""
    program = (
        "import sys; sys.path.insert(0, 'deploy'); import audit\n"
        "listed = [{'name': 'six', 'skip_reason': 'not found'}, {'name': 'Idna', 'vulns': []}]\n"
        "audit.read_report(listed, {'six': '1', 'idna': '3'})"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "NotAsked: the index has no advisories for 1 of 2 distributions (six" in done.stderr


def test_a_bill_of_materials_that_lacks_a_pin_is_refused(tmp_path: Path) -> None:
    components = [{"name": name, "version": version} for name, version in pins().items()]
    document = {"bomFormat": "CycloneDX", "specVersion": "1.6", "components": components}
    command = [sys.executable, "deploy/check_sbom.py", str(tmp_path / "sbom.json")]
    for left_out, status in ((0, 0), (1, 1)):
        given = {**document, "components": components[left_out:]}
        (tmp_path / "sbom.json").write_text(json.dumps(given))
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == status, done.stdout


CYCLONEDX = ROOT / ".tools/bin/cyclonedx-py"


@pytest.mark.slow
@pytest.mark.skipif(not CYCLONEDX.exists(), reason="SBOM NOT MADE: `make sbom` installs its tool")
def test_the_bill_of_materials_names_what_is_installed(tmp_path: Path) -> None:
    made = tmp_path / "sbom.json"
    command = [str(CYCLONEDX), "environment", "--sv", "1.6", "-o", str(made), sys.executable]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    check = [sys.executable, "deploy/check_sbom.py", str(made)]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
