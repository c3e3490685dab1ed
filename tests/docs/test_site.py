"""The site: documents are staged so that their links hold, and links of built pages are checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.links import problems_of
from docs.site import SEEDS, apart_lists, stage


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for seed in SEEDS:
        write(tmp_path / seed, f"# {seed}\n")
    write(
        tmp_path / "docs/page.md", "[a](../deploy/README.md) [b](notes) [c](../files/x.yaml#top)\n"
    )
    write(tmp_path / "docs/notes/001-first.md", "# 1. First\n")
    write(tmp_path / "docs/script.py", "print()\n")
    write(tmp_path / "docs/plots.html", '<a href="notes/001-first.md#x">1</a>')
    write(tmp_path / "deploy/README.md", "```sh\ncat [b](../docs)\n```\n")
    write(tmp_path / "files/x.yaml", "{}\n")
    write(tmp_path / "secret/unlinked.md", "# No\n")
    return tmp_path


def staged(project: Path) -> Path:
    stage(project, to=project / "build/source")
    return project / "build/source"


def test_documents_and_what_they_link_to_keep_their_paths(project: Path) -> None:
    source = staged(project)
    found = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert found == {
        *SEEDS, "docs/page.md", "docs/plots.html", "docs/notes/001-first.md",
        "docs/notes/README.md", "deploy/README.md", "files/x.yaml",
    }  # fmt: skip


def test_a_link_to_a_folder_leads_to_a_list_of_its_documents(project: Path) -> None:
    source = staged(project)
    assert "[b](notes/README.md)" in (source / "docs/page.md").read_text()
    assert "- [1. First](001-first.md)" in (source / "docs/notes/README.md").read_text()
    assert "[b](../docs)" in (source / "deploy/README.md").read_text()


def test_a_list_behind_a_line_of_text_is_set_apart_and_code_is_not() -> None:
    text = "Three:\n- one\n- two\n  more\n- three\n\n```sh\ncat x\n- y\n```\n"
    assert apart_lists(text) == text.replace("Three:\n", "Three:\n\n")


def test_code_in_a_list_stays_in_its_item() -> None:
    text = "1. Do:\n\n   ```sh\n   ls \\\n     x\n   ```\n\n   Then go.\n"
    assert apart_lists(text) == "1. Do:\n\n        ls \\\n          x\n\n    Then go.\n"


def test_a_finished_page_links_to_the_page_that_a_document_becomes(project: Path) -> None:
    assert 'href="notes/001-first/#x"' in (staged(project) / "docs/plots.html").read_text()


def test_links_that_lead_nowhere_and_assets_of_other_hosts_are_named(tmp_path: Path) -> None:
    write(
        tmp_path / "index.html", '<h2 id="top"></h2><a href="deep/#here">x</a><a href="no/">y</a>'
    )
    write(
        tmp_path / "deep/index.html",
        '<p id="here"><a href="../#top">up</a><a href="../#gone">z</a><a href="https://a.org">o</a>'
        '<script src="https://cdn.example.org/x.js"></script><img src="../photo.png">'
        '<a href="/index.html">home</a><img src="data:image/png;base64,AA==">',
    )
    write(tmp_path / "theme.css", "@import 'https://fonts.example.org/a'; b { src: url(c.woff) }")
    assert problems_of(tmp_path) == [
        "deep/index.html: https://cdn.example.org/x.js is fetched from elsewhere",
        "deep/index.html: ../#gone leads nowhere",
        "deep/index.html: ../photo.png leads nowhere",
        "index.html: no/ leads nowhere",
        "theme.css: https://fonts.example.org/a is fetched from elsewhere",
    ]
