"""What goes into the repository is complete, and speaks of the project only."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import yaml

from model_store import __version__
from tests.packaging.project import ROOT, pyproject, tracked_files

MACHINE_PATH = re.compile(r"(?<![\w.~$}/-])/(?:home|root|Users|work|mnt|tmp/bash_jobs)/[\w.-]+")
MOST_TARGETS = 14
TEXT = {".md", ".py", ".toml", ".txt", ".yaml", ".yml", ".html", ".css", ".js", ".json", ""}


def machine_paths(text: str) -> list[str]:
    return MACHINE_PATH.findall(text)


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    texts = [path for path in tracked_files() if path.suffix in TEXT]
    found = {
        str(path.relative_to(ROOT)): paths
        for path in texts
        if path != Path(__file__) and (paths := machine_paths(path.read_text()))
    }
    assert found == {}
    assert len(texts) > 20


def test_a_machine_path_is_noticed() -> None:
    assert machine_paths("see /home/ada/models and '/work/x'") == ["/home/ada", "/work/x"]
    assert machine_paths("$HOME/work/x ./root/x a/home/b https://host/home/x") == []


def anchors(document: Path) -> set[str]:
    """List the headings of a document as links name them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def leads_somewhere(path: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    found = path.parent / name if name else path
    return found.exists() and (not anchor or anchor in anchors(found))


def test_every_link_between_documents_leads_somewhere() -> None:
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in tracked_files()
        if path.suffix == ".md"
        for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)", path.read_text())
        if not leads_somewhere(path, target)
    ]
    assert broken == []


def decision_records() -> list[Path]:
    folders = ROOT / "docs/adr", ROOT / "docs/notebook"
    return sorted(path for folder in folders for path in folder.glob("[0-9]*.md"))


def test_the_index_of_decisions_lists_every_record_with_its_status() -> None:
    rows = re.findall(
        r"^\| \[(\d{3})\]\((\S+)\) \| .+ \| (.+) \|$",
        (ROOT / "docs/adr/README.md").read_text(),
        re.MULTILINE,
    )
    places = [(ROOT / "docs/adr" / target).resolve() for _, target, _ in rows]
    assert places == sorted(decision_records(), key=lambda path: path.name)
    assert [number for number, _, _ in rows] == [path.name[:3] for path in places]
    known = re.compile(r"binding|measured|superseded by \d{3}")
    assert [status for _, _, status in rows if not known.match(status)] == []


def test_every_decision_record_has_its_number_and_a_title() -> None:
    records = decision_records()
    wrong = [
        path.name
        for path in records
        if not re.match(rf"# {path.name[:3]}\. [A-Z].*[^.]\n\n", path.read_text())
    ]
    numbers = [path.name[:3] for path in records]
    assert wrong == []
    assert len(set(numbers)) == len(numbers) > 30


def test_the_workflow_and_the_hooks_call_the_projects_own_commands() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert all(step["uses"].startswith("actions/") for step in job["steps"] if "uses" in step)
    supported = [one for one in pyproject()["project"]["classifiers"] if "Python :: 3." in one]
    assert [one.rpartition(" ")[2] for one in supported] == job["strategy"]["matrix"]["python"]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"] for repo in hooks for hook in repo["hooks"]]
    assert entries == [".venv/bin/ruff check", ".venv/bin/ruff format", ".venv/bin/mypy"]


def test_the_changelog_has_the_version_of_the_sources() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}$", text, re.MULTILINE)
    assert released[0] == __version__
    assert "\n## [Unreleased]\n" in text.partition(f"[{__version__}]")[0]


def test_ci_runs_the_readmes_test_command() -> None:
    ci = ROOT / ".ci/run"
    assert os.access(ci, os.X_OK)
    assert "\nmake test\n" in ci.read_text()
    assert "make test" in (ROOT / "README.md").read_text()
    subprocess.run(["bash", "-n", str(ci)], check=True)


def test_make_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)[0].split()
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [name for name in targets if f"make {name} " not in done.stdout] == []
    assert len(targets) <= MOST_TARGETS


def test_a_suite_that_is_unknown_ends_make_with_the_list_of_all() -> None:
    every = " ".join(sorted(suites()))
    for name in ("test", "", "long faults"):
        asked = ["make", "test", f"SUITE={name}"]
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert f"there is no suite '{name}'; choose one of {every}." in done.stderr


def test_make_lists_every_suite_and_the_texts_name_no_other() -> None:
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [name for name in suites() if f"\n  {name} " not in shown] == []
    texts = "".join(path.read_text() for path in tracked_files() if path.suffix in TEXT)
    named = set(re.findall(r"make test SUITE=([a-z][a-z-]*)", texts))
    assert {"long", *named} <= {*suites()}


def suites() -> list[str]:
    return re.findall(r"^suite-([a-z-]+) :=", (ROOT / "Makefile").read_text(), re.MULTILINE)
