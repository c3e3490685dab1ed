from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from model_store.errors import Interrupted
from model_store.store.cache import default_checkpoint_folder
from model_store.store.store import Store
from tests.machine import run_folder
from tests.trainer.folders import SIZES, Listening, asked, write_classes
from trainer.add_task import add_task
from trainer.cli import main
from trainer.request import AddTask, Effort, NetworkShape

EFFORT = Effort(epochs=4, batch_size=20)  # 2 batches an epoch, and 1 epoch of balancing


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def request_for(store: Path, digits: Path, kept: Path | None, **others: object) -> AddTask:
    shared = {"augment": "light", "loss": "binary", "shape": NetworkShape()}
    options = {"effort": EFFORT, **shared, **others}
    return asked(store, digits, checkpoint=kept, **options)


def interrupt(request: AddTask, *, phase: str, after: int) -> str:
    with pytest.raises(Interrupted) as stopped:
        add_task(request, progress=Listening(interrupt_in=phase, after=after))
    return str(stopped.value)


def shards_of(request: AddTask, *, progress: Listening | None = None) -> list[str]:
    manifest = add_task(request, progress=progress or Listening()).manifest
    return [ref.sha256 for ref in manifest.shards]


@pytest.fixture(scope="module")
def begun_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    letters = write_classes(folder / "letters", ["a", "b"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DNE_CACHE", str(run_folder(tmp_path_factory) / "cache"))
        add_task(asked(folder / "models", letters), progress=Listening())
    return folder / "models"


@pytest.fixture
def two_stores(begun_once: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two stores that hold the same first version: one to be interrupted on, one not."""
    stores = tmp_path / "one", tmp_path / "two"
    for store in stores:
        shutil.copytree(begun_once, store)
    return stores


@dataclass(frozen=True, slots=True)
class Whole:
    """A run that nothing stops."""

    shards: list[str]
    losses: list[float]


LONG_EFFORT = Effort(epochs=8, batch_size=20)  # and 2 epochs of balancing


@pytest.fixture(scope="module")
def whole(begun_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    digits = write_classes(folder / "digits", ["0", "1"])
    shutil.copytree(begun_once, folder / "models")
    progress = Listening()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DNE_CACHE", str(run_folder(tmp_path_factory) / "cache"))
        request = request_for(folder / "models", digits, None, effort=LONG_EFFORT)
        return Whole(shards_of(request, progress=progress), progress.losses)


@pytest.mark.long
@pytest.mark.parametrize(
    ("phase", "after", "reached"),
    [
        ("learning", 3, "epoch 1 of learning"),
        ("balancing", 1, "epoch 8 of learning"),
        ("balancing", 4, "epoch 1 of balancing"),
    ],
)
def test_an_interrupted_run_goes_on_to_the_same_bits(
    two_stores: tuple[Path, Path],
    digits: Path,
    kept: Path,
    whole: Whole,
    phase: str,
    after: int,
    reached: str,
) -> None:
    interrupted = request_for(two_stores[0], digits, kept, effort=LONG_EFFORT)
    message = interrupt(interrupted, phase=phase, after=after)
    assert "nothing was published; the same command goes on after " + reached in message
    assert str(kept) in message
    assert Store.open(interrupted.store).versions() == [1]
    progress = Listening()
    assert shards_of(interrupted, progress=progress) == whole.shards
    assert any(note.startswith(f"going on after {reached}") for note in progress.notes)
    assert len(progress.losses) < len(whole.losses)
    assert progress.losses == whole.losses[-len(progress.losses) :]


@pytest.mark.long
def test_a_run_that_is_interrupted_again_and_again_ends_the_same(
    two_stores: tuple[Path, Path], digits: Path, kept: Path
) -> None:
    request = request_for(two_stores[0], digits, kept)
    for after in (3, 3):
        interrupt(request, phase="learning", after=after)
    assert shards_of(request) == shards_of(request_for(two_stores[1], digits, None))


def test_what_is_kept_is_safetensors_and_json_and_gone_after_publishing(
    two_stores: tuple[Path, Path], digits: Path, kept: Path
) -> None:
    request = request_for(two_stores[0], digits, kept)
    interrupt(request, phase="learning", after=3)
    assert sorted(path.suffix for path in kept.iterdir()) == [".json", ".safetensors"]
    add_task(request, progress=Listening())
    assert not kept.exists()


def test_an_interruption_before_the_first_epoch_leaves_nothing_to_go_on_with(
    two_stores: tuple[Path, Path], digits: Path, kept: Path
) -> None:
    request = request_for(two_stores[0], digits, kept)
    assert interrupt(request, phase="learning", after=1) == "interrupted: nothing was published"
    assert not kept.exists()


@pytest.mark.long
def test_a_checkpoint_of_another_configuration_is_named_and_not_used(
    two_stores: tuple[Path, Path], digits: Path, kept: Path
) -> None:
    interrupt(request_for(two_stores[0], digits, kept), phase="learning", after=3)
    (theirs,) = kept.glob("*.json")
    progress = Listening()
    other = {"seed": 7, "effort": Effort(epochs=2)}
    got = shards_of(request_for(two_stores[0], digits, kept, **other), progress=progress)
    (note,) = [note for note in progress.notes if "another configuration" in note]
    assert str(theirs) in note
    assert "epochs 4 there and 2 here" in note
    assert "seed 0 there and 7 here" in note
    assert got == shards_of(request_for(two_stores[1], digits, None, **other))
    assert theirs.exists()  # whoever wants to go on with that one still can


def test_other_images_make_another_run(
    two_stores: tuple[Path, Path], digits: Path, kept: Path
) -> None:
    request = request_for(two_stores[0], digits, kept)
    interrupt(request, phase="learning", after=3)
    (digits / "0" / "000.png").rename(digits / "1" / "zzz.png")
    progress = Listening()
    add_task(request, progress=progress)
    assert any("another configuration (images " in note for note in progress.notes)


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_damaged_checkpoint_is_said_to_be_and_the_run_starts_anew(
    two_stores: tuple[Path, Path], digits: Path, kept: Path, suffix: str
) -> None:
    request = request_for(two_stores[0], digits, kept)
    interrupt(request, phase="learning", after=3)
    (path,) = kept.glob(f"*{suffix}")
    path.write_bytes(path.read_bytes()[:-40])
    progress = Listening()
    got = shards_of(request, progress=progress)
    assert any("damaged and is not used" in note for note in progress.notes)
    assert got == shards_of(request_for(two_stores[1], digits, None))


def test_where_nothing_can_be_kept_the_run_goes_on_without(
    two_stores: tuple[Path, Path], digits: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    progress = Listening()
    request = request_for(two_stores[0], digits, tmp_path / "file" / "kept")
    assert add_task(request, progress=progress).promoted
    assert len([note for note in progress.notes if "no checkpoints are kept" in note]) == 1


def test_a_checkpoint_without_our_seal_is_not_used(
    two_stores: tuple[Path, Path], digits: Path, kept: Path
) -> None:
    request = request_for(two_stores[0], digits, kept)
    interrupt(request, phase="learning", after=3)
    assert kept.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in kept.iterdir()} == {0o600}
    (path,) = kept.glob("*.json")
    record = json.loads(path.read_bytes())
    path.write_text(json.dumps({**record, "epochs": record["epochs"] + 1}))
    progress = Listening()
    add_task(request, progress=progress)
    assert any("forged or damaged and is not used" in note for note in progress.notes)


def test_a_folder_that_others_may_write_has_no_checkpoints(
    two_stores: tuple[Path, Path], digits: Path, kept: Path
) -> None:
    kept.mkdir()
    kept.chmod(0o770)
    progress = Listening()
    assert add_task(request_for(two_stores[0], digits, kept), progress=progress).promoted
    assert any(f"chmod 700 {kept}" in note for note in progress.notes)


def test_each_store_and_data_folder_has_a_place_of_its_own(tmp_path: Path) -> None:
    one = default_checkpoint_folder(store=str(tmp_path / "models"), data=tmp_path / "a")
    assert one == default_checkpoint_folder(
        store=str(tmp_path / "x" / ".." / "models"), data=tmp_path / "a"
    )
    others = {
        default_checkpoint_folder(store=str(tmp_path / "models"), data=tmp_path / "b"),
        default_checkpoint_folder(store="s3://bucket/models", data=tmp_path / "a"),
    }
    assert len({one, *others}) == 3
    assert one.parent.parent == Path(os.environ["DNE_CACHE"], "checkpoints")


def test_a_place_that_cannot_be_is_wrong_usage(
    tmp_path: Path, letters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "models"
    command = ["add-task", "--data", str(letters), "--store", str(store), *SIZES, "--checkpoint"]
    assert main([*command, str(store / "kept")]) == 2
    assert "is inside the store" in capsys.readouterr().err
    assert main([*command, str(letters / "a" / "000.png")]) == 2
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.long
def test_a_killed_run_leaves_no_store_and_the_same_command_goes_on(
    tmp_path: Path, letters: Path, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "models"
    command = [
        *("add-task", "--data", str(letters), "--store", str(store), "--checkpoint", str(kept)),
        *("--epochs", "80", "--batch-size", "20", *SIZES),
    ]
    run = f"import sys; from trainer.cli import main; sys.exit(main({command!r}))"
    process = subprocess.Popen([sys.executable, "-c", run], stderr=subprocess.DEVNULL)
    try:
        wait_for_epochs(kept, 1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not store.exists()
    assert main([*command, "--json"]) == 0
    written = capsys.readouterr()
    assert "going on after epoch" in written.err
    assert json.loads(written.out)["version"] == 1
    assert not kept.exists()


def wait_for_epochs(kept: Path, count: int) -> None:
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        for path in kept.glob("*.json"):
            if json.loads(path.read_bytes())["epochs"] >= count:
                return
        time.sleep(0.02)
    pytest.fail("no checkpoint was written")
