"""`dne-store list` in a store with hundreds of versions: what it reads, shows and keeps."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from model_store.backends.local import LocalDirectory
from model_store.cli.main import main
from model_store.layout import version_name, version_of
from model_store.maintenance.forget import delete_version
from model_store.records.quality import Gate
from model_store.store.cache import cache_folder
from model_store.store.store import Store
from tests.many_versions import write_versions
from tests.model_store.drafts import prepare

COUNT = 120
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    location = tmp_path_factory.mktemp("many") / "models"
    write_versions(location, count=COUNT, tasks=2)
    return location


@pytest.fixture
def own(many: Path, tmp_path: Path) -> Path:
    """A copy of the store that a test may change."""
    return Path(shutil.copytree(many, tmp_path / "own"))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The versions whose manifests were read; with a cache folder of its own."""
    monkeypatch.setenv("DNE_CACHE", str(tmp_path / "cache"))
    found: list[int] = []
    true_read = LocalDirectory.read

    def counted(self: LocalDirectory, name: str, *, max_bytes: int) -> bytes:
        found.extend(filter(None, [version_of(name)]))
        return true_read(self, name, max_bytes=max_bytes)

    monkeypatch.setattr(LocalDirectory, "read", counted)
    return found


def _lines(capsys: Capture, store: Path, *arguments: str) -> list[str]:
    assert main(["list", *arguments, "--store", str(store)]) == 0
    return capsys.readouterr().out.splitlines()


def _json(capsys: Capture, store: Path, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_lines(capsys, store, "--json", *arguments)[-1])
    return found


def test_the_newest_thirty_are_shown_and_no_others_are_read(
    many: Path, read: list[int], capsys: Capture
) -> None:
    _, *rows, rest = _lines(capsys, many)
    assert [int(row.split()[0]) for row in rows] == list(range(91, 121))
    assert rows[-1].endswith("production (follow)")
    assert rest == (
        "30 of 120 versions; `dne-store list --before 91` shows older ones, `--all` every one"
    )
    assert sorted(read) == list(range(90, 121)), "those thirty and the parent of the oldest"


@pytest.mark.parametrize(
    ("arguments", "first", "last"),
    [
        (["--limit", "5"], 116, 120),
        (["--before", "91", "--limit", "30"], 61, 90),
        (["--before", "4"], 1, 3),
        (["--before", "100", "--limit", "2"], 98, 99),
        (["--all"], 1, 120),
        (["--all", "--before", "7"], 1, 6),
        (["--limit", "1000"], 1, 120),
    ],
)
def test_others_are_shown_when_asked_for(
    many: Path, capsys: Capture, arguments: list[str], first: int, last: int
) -> None:
    rows = [line for line in _lines(capsys, many, *arguments)[1:] if line[0].isdigit()]
    numbers = [int(row.split()[0]) for row in rows if "versions;" not in row]
    assert numbers == list(range(first, last + 1))
    found = _json(capsys, many, *arguments)
    assert [row["version"] for row in found["versions"]] == numbers
    assert found["total"] == COUNT
    assert found["next_before"] == (None if first == 1 else first)


def test_a_page_of_nothing_says_so(many: Path, capsys: Capture) -> None:
    assert _lines(capsys, many, "--before", "1") == [
        "none of the 120 versions has a smaller number"
    ]


def test_json_is_whole_unless_a_limit_is_asked_for(many: Path, capsys: Capture) -> None:
    found = _json(capsys, many)
    assert (len(found["versions"]), found["total"], found["next_before"]) == (COUNT, COUNT, None)


@pytest.mark.parametrize("arguments", [["--limit", "0"], ["--limit", "5", "--all"]])
def test_what_makes_no_sense_is_wrong_usage(many: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["list", *arguments, "--store", str(many)])
    assert ended.value.code == 2


def test_manifests_that_were_read_once_are_not_read_again(
    many: Path, read: list[int], capsys: Capture
) -> None:
    first = _lines(capsys, many, "--all")
    assert len(read) == COUNT
    read.clear()
    assert _lines(capsys, many, "--all") == first
    assert read == []


def test_a_version_that_is_new_is_all_that_is_read(
    own: Path, read: list[int], capsys: Capture
) -> None:
    _lines(capsys, own, "--all")
    store = Store.open(str(own))
    prepare(parent=store.manifest(COUNT), seed=5).publish(store)
    read.clear()
    assert _lines(capsys, own, "--all")[-1].split()[0] == "121"
    assert set(read) <= {120, 121}


def test_a_manifest_that_is_damaged_since_is_told(own: Path, read: list[int]) -> None:
    assert main(["list", "--all", "--store", str(own)]) == 0
    path = own / version_name(7)
    path.write_bytes(path.read_bytes().replace(b'"it fell"', b'"it rose"').replace(b"0.5", b"0.6"))
    assert main(["list", "--all", "--store", str(own)]) == 1


def test_a_row_is_made_anew_when_its_ancestor_is_deleted(
    own: Path, read: list[int], capsys: Capture
) -> None:
    store = Store.open(str(own))
    before = _json(capsys, own)["versions"]
    delete_version(store, 2, actor="tests", reason="")
    after = _json(capsys, own)["versions"]
    assert [row["version"] for row in after] == [1, *range(3, 121)]
    assert before[2]["delta_bytes"] == 0
    assert after[1]["delta_bytes"] > 0, "its nearest ancestor is version 1 now"
    assert after[1] == _json(capsys, own, "--limit", "1", "--before", "4")["versions"][0]


@pytest.mark.parametrize("harm", ["torn", "changed", "open to others", "link", "folder", "empty"])
def test_kept_rows_that_cannot_be_believed_cost_time_alone(
    many: Path, read: list[int], capsys: Capture, harm: str, tmp_path: Path
) -> None:
    first = _lines(capsys, many, "--all")
    (path,) = (cache_folder() / "summaries").iterdir()
    data = path.read_bytes()
    match harm:
        case "torn":
            path.write_bytes(data[:-100])
        case "changed":
            path.write_bytes(data.replace(b'"refused', b'"passed!'))
        case "open to others":
            path.chmod(0o666)
        case "link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        case "folder":
            path.unlink()
            path.mkdir()
        case _:
            path.write_bytes(b"")
    read.clear()
    assert _lines(capsys, many, "--all") == first
    assert len(read) == COUNT


def test_a_cache_that_cannot_be_written_is_no_failure(
    many: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("DNE_CACHE", str(tmp_path / "file"))
    assert len(_lines(capsys, many, "--all")) == COUNT + 1


def test_kept_rows_of_few_stores_stay(
    many: Path, read: list[int], capsys: Capture, tmp_path: Path
) -> None:
    folder = cache_folder() / "summaries"
    folder.mkdir(parents=True)
    for number in range(40):
        (folder / f"{number:032x}.rows").write_bytes(b"")
        os.utime(folder / f"{number:032x}.rows", (number, number))
    (folder / "of-a-stranger").write_bytes(b"")
    _lines(capsys, many, "--all")
    names = {path.name for path in folder.iterdir()}
    assert len(names) == 17
    assert {"of-a-stranger", f"{39:032x}.rows"} <= names


@pytest.mark.parametrize(
    ("gate", "mark"),
    [
        (None, "not judged"),
        (Gate(passed=True), "passed"),
        (Gate(passed=False, reasons=("it fell",)), "! refused"),
        (Gate(passed=False, forced=True, reasons=("it fell",)), "! overruled"),
    ],
)
def test_what_the_gate_said_is_seen_at_a_glance(
    location: str, gate: Gate | None, mark: str, capsys: Capture
) -> None:
    store = Store.open(location)
    made = prepare()
    metrics = made.draft.metrics.model_copy(update={"gate": gate})
    made = type(made)(made.draft.model_copy(update={"metrics": metrics}), made.shards)
    made.publish(store)
    title, row = _lines(capsys, Path(location))
    place = title.index("gate")
    assert row[place:].startswith(f"{mark}  ")
    (found,) = _json(capsys, Path(location))["versions"]
    assert found["gate"].startswith(mark.removeprefix("! "))
