"""The parts of `dne demo` that can go wrong before anything is learnt."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import pytest
from PIL import Image

from dne_client import __main__ as command
from dne_client.demo import story
from dne_client.demo.story import DIGIT_TASKS, DemoData, images_in, write_demo_data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DemoData:
    return write_demo_data(tmp_path_factory.mktemp("data"))


def test_every_digit_is_either_learnt_or_held_out(data: DemoData) -> None:
    held_out = {path.name for path in data.test_images()}
    learnt = {path.name for task in DIGIT_TASKS for path in data.train(task).rglob("*.png")}
    assert len(held_out) == 599
    assert len(learnt) == 1797 - 599
    assert not held_out & learnt
    classes = [folder.name for task in DIGIT_TASKS for folder in sorted(data.train(task).iterdir())]
    assert classes == [f"digit_{digit}" for digit in range(10)]


def test_the_fourth_task_has_its_own_classes_and_images(data: DemoData) -> None:
    for folder, count in ((data.shapes_train, 120), (data.shapes_test, 60)):
        assert sorted(shape.name for shape in folder.iterdir()) == ["cross", "triangle"]
        images = images_in(folder / "cross")
        assert len(images) == count
        with Image.open(images[0]) as image:
            assert image.size == (8, 8)


def test_a_taken_port_is_replaced_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert story.free_port(port) != port
        assert f"Port {port} is taken" in capsys.readouterr().out


def test_a_second_demo_leaves_the_first_ones_store_alone(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with story.fresh_folder(folder) as place:
        place.store.mkdir()
        with pytest.raises(story.DemoFailed, match="another demo"), story.fresh_folder(folder):
            pass
        assert place.store.exists()
    with story.fresh_folder(folder) as place:
        assert not place.store.exists()


def test_a_folder_with_other_peoples_files_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "demo/models"
    models.mkdir(parents=True)
    assert command.main(["demo", "--folder", str(tmp_path / "demo")]) == 1
    assert "no demo made; choose another with --folder" in capsys.readouterr().err
    assert models.exists()
    (tmp_path / "file").touch()
    assert command.main(["demo", "--folder", str(tmp_path / "file")]) == 1
    assert "cannot be the demo's folder" in capsys.readouterr().err


def test_without_scikit_learn_the_demo_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [one for one in sys.modules if one.startswith("dne_client.demo")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("dne_client.demo")
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert command.main(["demo"]) == 2
    assert "pip install 'dne-serve[demo]'" in capsys.readouterr().err


def test_a_command_is_spelt_so_that_it_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(story, "COMMANDS", tmp_path / "bin")
    monkeypatch.setenv("PATH", "")
    assert story.spelt("dne-train") == "bin/dne-train"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/dne-train").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert story.spelt("dne-train") == "dne-train"
    monkeypatch.setattr(story, "COMMANDS", Path("/elsewhere/bin"))
    assert story.spelt("dne-train") == "/elsewhere/bin/dne-train"


def test_a_process_is_stopped_even_if_it_will_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "STOP_S", 0.2)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ignoring', flush=True); time.sleep(60)"
    )
    process = story.start(Path(sys.executable).name, "-c", deaf, stdout=-1)
    with story.stopping(process, signal.SIGTERM):
        assert process.stdout is not None
        process.stdout.readline()
    process.stdout.close()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.long
def test_a_failing_trainer_ends_the_demo_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(story.DemoFailed, match="missing-folder"):
        story.DemoFolder(tmp_path).train("add-task", "--data", str(tmp_path / "missing-folder"))
