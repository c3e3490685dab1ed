"""Build the documents as a site of plain files, and check its links: `make site`.

The documents are staged under their paths in the repository, with the files that they link to, so
that links between them hold. mkdocs turns the staged folder into pages. It needs the tools of
deploy/tools.lock, and nothing of the project.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from docs.links import problems_of

PROJECT = Path(__file__).resolve().parents[1]
SOURCE = PROJECT / "build/site-source"
SITE = PROJECT / "build/site"
"""Both as mkdocs.yml names them."""
SEEDS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
KINDS = frozenset({".md", ".svg", ".png", ".webp", ".html", ".ipynb"})
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(?=[)#])")
CODE_IN_LIST = re.compile(r"^ {3}```\w*\n(.*?)^ {3}```\n", re.MULTILINE | re.DOTALL)
LIST = re.compile(r"^((?![-#|>\s]|\d+\. ).+)\n(?=- |1\. )", re.MULTILINE)
DOCUMENT_LINK = re.compile(r"""(href="(?!https?:)[^"#]+)\.md(?=["#])""")
"""A finished page may link to a document, which is a folder in the site."""
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def main() -> int:
    stage(PROJECT, to=SOURCE)
    # Not --quiet: that would hide warnings from --strict too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean"]
    if code := subprocess.run(command, cwd=PROJECT).returncode:
        return code
    problems = problems_of(SITE)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    pages = sum(1 for _ in SITE.rglob("*.html"))
    print(f"{pages} pages in {SITE.relative_to(PROJECT)}, {len(problems)} problems")
    return 1 if problems else 0


def stage(project: Path, *, to: Path) -> None:
    """Copy the documents, and everything that they link to, into an empty folder."""
    shutil.rmtree(to, ignore_errors=True)
    waiting = [project / seed for seed in SEEDS]
    waiting += [one for one in (project / "docs").rglob("*") if one.suffix in KINDS]
    staged: set[Path] = set()
    while waiting:
        path = waiting.pop().resolve()
        if path in staged:
            continue
        staged.add(path)
        target = to / path.relative_to(project)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = read_document(path)
            target.write_text(apart_lists(named_folders(text, folder=path.parent)))
            waiting += linked(text, folder=path.parent)
        elif path.suffix == ".html":
            target.write_text(DOCUMENT_LINK.sub(r"\1/", path.read_text()))
        else:
            shutil.copyfile(path, target)


def read_document(path: Path) -> str:
    """Read a document; a folder without one has its files listed."""
    if path.is_file():
        return path.read_text()
    files = sorted(one.name for one in path.parent.iterdir() if one.is_file())
    lines = [f"- [{title_of(path.parent / one)}]({one})\n" for one in files]
    return f"# {path.parent.name}\n\n" + "".join(lines)


def title_of(path: Path) -> str:
    """Return the heading of a document, and the name of any other file."""
    heading = path.read_text().partition("\n")[0] if path.suffix == ".md" else ""
    return heading.removeprefix("# ") or path.name


def named_folders(text: str, *, folder: Path) -> str:
    """Point links to folders at the document of the folder: a page has no list of files."""

    def named(link: re.Match[str]) -> str:
        return f"{link[1].rstrip('/')}/README.md" if (folder / link[1]).is_dir() else link[1]

    return "".join(
        part if part.startswith("```") else LINK.sub(named, part) for part in FENCE.split(text)
    )


def apart_lists(text: str) -> str:
    """Write lists as mkdocs asks for: after an empty line, and with code that is indented."""
    parts = FENCE.split(CODE_IN_LIST.sub(_indented, text))
    return "".join(part if part.startswith("```") else _apart(part) for part in parts)


def _apart(text: str) -> str:
    return LIST.sub(r"\1\n\n", re.sub(r"^ {3}(?=\S)", "    ", text, flags=re.MULTILINE))


def _indented(code: re.Match[str]) -> str:
    return "".join(f"     {line}" for line in code[1].splitlines(keepends=True))


def linked(text: str, *, folder: Path) -> Iterator[Path]:
    """Find the files that a document links to."""
    for part in FENCE.split(named_folders(text, folder=folder)):
        if not part.startswith("```"):
            for name in LINK.findall(part):
                path = folder / name
                if path.exists() or path.name == "README.md":
                    yield path


if __name__ == "__main__":
    sys.exit(main())
