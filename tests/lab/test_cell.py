"""A cell that is killed at any point goes on to the same results."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lab import results, saved
from lab.cell import Run, right_answers
from lab.dataset import Dataset
from lab.results import Line
from model_store.errors import DataRejected
from tests.lab.killed import go, tiny_cell, tiny_data
from tests.lab.synthetic import write_zip
from tests.lab.tiny import TINY, run_cell
from tests.packaging.project import ROOT
from tests.trainer.folders import Listening
from trainer.data.folders import LabelledImages


@pytest.fixture(scope="module")
def zip_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_zip(tmp_path_factory.mktemp("data") / "data.zip")


@pytest.fixture(scope="module")
def data(zip_file: Path) -> Dataset:
    return tiny_data(zip_file)


@pytest.fixture(scope="module")
def finished(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("finished")
    go(data, out=folder / "lines.jsonl", folder=folder)
    return folder


@pytest.fixture
def whole(finished: Path) -> list[Line]:
    return read(finished / "lines.jsonl")


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """Copy the folder of the finished run."""
    return shutil.copytree(finished, tmp_path / "copy")


def read(path: Path) -> list[Line]:
    return results.read([path], note=print)


def alike(lines: Sequence[Line]) -> list[Line]:
    """Leave out the members that tell about the process and not about the result."""
    return [replace(line, cpu_s=0.0, resumed=False, shared_base=False, commit="") for line in lines]


def state(folder: Path) -> Mapping[str, torch.Tensor]:
    """Read the weights and exemplars of the only cell in a folder."""
    (path,) = (folder / "cells").glob("*.safetensors")
    kept = saved.read(path, note=print)
    assert kept is not None
    return kept[0]


def same(some: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(
        torch.equal(one, others[name]) for name, one in some.items()
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("writes", "least"),
    [
        (("4", "5", "6"), 3),
        pytest.param(
            ("1", "2", "3"), 15, marks=[pytest.mark.slow, pytest.mark.timeout(900)], id="everywhere"
        ),
    ],
)
def test_a_cell_that_is_killed_again_and_again_ends_with_the_same_lines_and_bits(
    zip_file: Path, finished: Path, tmp_path: Path, writes: tuple[str, ...], least: int
) -> None:
    out, folder = tmp_path / "lines.jsonl", tmp_path / "cache"
    given = [str(zip_file), str(out), str(folder), *writes]
    command = [sys.executable, "-m", "tests.lab.killed", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= least
    assert alike(read(out)) == alike(read(finished / "lines.jsonl"))
    assert same(state(folder), state(finished))
    assert list((folder / "checkpoints").glob("*")) == []


def test_an_answer_among_the_newest_classes_does_not_see_the_older_ones() -> None:
    images = LabelledImages(
        classes=tuple("abcd"),
        pixels_NHWC=np.zeros((3, 1, 1, 3), dtype=np.uint8),
        labels_N=np.array([2, 3, 3]),
    )
    scores = np.array([[9, 0, 2, 1], [0, 0, 1, 2], [0, 9, 2, 1]], dtype=np.float32)
    assert right_answers(scores, images).tolist() == [False, True, False]
    assert right_answers(scores, images, newest=2).tolist() == [True, True, False]


def test_a_finished_cell_writes_its_lines_into_another_file(
    data: Dataset, whole: list[Line], folder: Path
) -> None:
    assert go(data, out=folder / "other.jsonl", folder=folder).phases == []
    assert read(folder / "other.jsonl") == whole


def test_a_torn_line_is_written_again(data: Dataset, whole: list[Line], folder: Path) -> None:
    out = folder / "lines.jsonl"
    out.write_bytes(out.read_bytes()[:-9])
    told = go(data, out=out, folder=folder)
    assert told.phases == []
    assert any("torn" in note for note in told.notes)
    assert read(out) == whole


@pytest.mark.parametrize("where", ["cells", "bases"])
def test_a_damaged_file_of_the_cache_is_told_and_made_anew(
    data: Dataset, whole: list[Line], finished: Path, folder: Path, where: str
) -> None:
    if where == "bases":  # a base is read by cells that have not begun
        shutil.rmtree(folder / "cells")
    (file,) = (folder / where).glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 16
    file.write_bytes(content)
    told = go(data, out=folder / "other.jsonl", folder=folder)
    assert any(f"{file} is damaged" in note for note in told.notes)
    assert alike(read(folder / "other.jsonl")) == alike(whole)
    assert same(state(folder), state(finished))


def test_saved_tensors_are_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path, notes = tmp_path / "state.safetensors", list[str]()
    tensors = {"one": torch.arange(3.0), "two": torch.tensor(5), "none": torch.zeros(0, 2)}
    saved.write(path, tensors, {"lines": [1]})
    kept = saved.read(path, note=notes.append)
    assert kept is not None
    assert kept[1] == {"lines": [1]}
    assert all(torch.equal(kept[0][name], one) for name, one in tensors.items())
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place])
        assert saved.read(path, note=notes.append) is None
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        read_again = saved.read(path, note=notes.append)
        assert read_again is None or same(read_again[0], tensors)  # a bit of padding or JSON
    assert all("is damaged" in note for note in notes)


def test_cells_of_one_base_learn_the_first_task_once(
    data: Dataset, whole: list[Line], folder: Path
) -> None:
    told = go(data, out=folder / "lines.jsonl", folder=folder, method="dne:k=2")
    assert any("the first task is taken from" in note for note in told.notes)
    assert told.phases == ["learning", "balanced tuning"] * 2
    other = next(line for line in read(folder / "lines.jsonl") if line.variant == "k=2")
    assert other.shared_base
    assert other.accuracies == whole[0].accuracies


def test_results_of_other_data_are_refused_before_anything_is_learnt(
    data: Dataset, whole: list[Line], tmp_path: Path
) -> None:
    out = tmp_path / "lines.jsonl"
    results.append(out, replace(whole[0], data_digest="other"))
    told = Listening()
    with pytest.raises(DataRejected, match="data_digest"):
        Run(tiny_cell(), data, out=out, folder=tmp_path, progress=told).go()
    assert told.phases == []


@pytest.mark.parametrize("choice", ["dne:network=independent", "lda"])
def test_networks_with_convolutions_share_their_first_task(choice: str, tmp_path: Path) -> None:
    learnt = replace(
        TINY,
        stem="convolutions",
        optimiser="muon",
        loss="balanced",
        exemplars="random",
        first_epochs=2,
        epochs=1,
        tuning_epochs=0,
    )
    first, _ = run_cell("dne", tmp_path, preset=learnt)
    other, lines = run_cell(choice, tmp_path, preset=learnt)
    assert lines[0].shared_base
    assert other.base_path == first.base_path
    assert lines[-1].classes == 6
    assert lines[-1].recipe == "convolutions, muon, balanced, standard changes, random exemplars"
