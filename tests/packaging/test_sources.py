"""What goes into the repository is complete, and speaks of the project only."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.packaging.project import ROOT, tracked_files

MACHINE_PATH = re.compile(r"(?<![\w.~$}/-])/(?:home|root|Users|work|mnt|tmp/bash_jobs)/[\w.-]+")
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


def test_every_link_between_documents_leads_somewhere() -> None:
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in tracked_files()
        if path.suffix == ".md"
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", path.read_text())
        if not (path.parent / target).exists()
    ]
    assert broken == []


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
