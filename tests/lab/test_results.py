"""Results survive kills, and lines of different comparisons do not mix."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lab import results
from model_store.errors import DataRejected
from tests.lab.synthetic import LINE, course


def read(path: Path) -> tuple[list[results.Line], list[str]]:
    notes: list[str] = []
    return results.read([path], note=notes.append), notes


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lines.jsonl"
    lines = course((0.5,), (0.25, 1 / 3))
    for line in lines:
        results.append(path, line)
    assert read(path) == (lines, [])


def test_what_later_code_measures_is_kept_and_not_asked_of_older_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    attention = {"SPSH": (0.25, 0.125), "DPDH": (0.75, 0.0625)}
    later = replace(LINE, task=1, new_alone=0.5, attention=attention)
    for line in (LINE, later):
        results.append(path, line)
    older, newer = map(json.loads, path.read_text().splitlines())
    assert newer.keys() - older.keys() == {"new_alone", "attention"}
    assert read(path) == ([LINE, later], [])


def test_a_torn_last_line_is_told_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    results.append(path, LINE)
    whole = path.read_bytes()
    for length in (1, 20, len(whole) - 1):
        path.write_bytes(whole + whole[:length])
        lines, notes = read(path)
        assert lines == [LINE]
        assert len(notes) == 1
        assert "torn" in notes[0]


def test_the_next_line_takes_the_place_of_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    results.append(path, LINE)
    path.write_bytes(path.read_bytes() * 2 + b'{"method": "dn')
    results.append(path, replace(LINE, task=1))
    assert read(path) == ([LINE, LINE, replace(LINE, task=1)], [])


def test_a_damaged_line_inside_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    results.append(path, LINE)
    path.write_bytes(b'{"method": "dne"}\n' + path.read_bytes())
    with pytest.raises(DataRejected, match=r"lines\.jsonl line 1 is not a result"):
        read(path)


@pytest.mark.parametrize("other", [{"preset": "short"}, {"data_digest": "other data"}])
def test_lines_of_other_presets_or_data_do_not_merge(tmp_path: Path, other: dict[str, str]) -> None:
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    results.append(paths[0], LINE)
    results.append(paths[1], replace(LINE, **other))  # type: ignore[arg-type]
    with pytest.raises(DataRejected, match="one preset, learnt in one way from one data set"):
        results.read(paths, note=print)
    with pytest.raises(DataRejected, match="one preset, learnt in one way from one data set"):
        results.read_beside(paths[1], preset="mini", data_digest="data", note=print)


def test_lines_of_other_recipes_do_not_merge(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for task, recipe in enumerate((None, "AdamW", "AdamW")):  # older lines do not tell
        results.append(path, replace(LINE, task=task, recipe=recipe))
    assert len(read(path)[0]) == 3
    results.append(path, replace(LINE, task=3, recipe="Muon"))
    with pytest.raises(DataRejected, match="different values of recipe: AdamW, Muon"):
        read(path)
