"""The parts of `make demo` that can go wrong before anything is learnt."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator
from email.parser import BytesParser
from email.policy import HTTP
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from tests.packaging.project import ROOT


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    """`deploy/demo.py`, which imports its neighbours by their bare names as a script does."""
    sys.path.insert(0, str(ROOT / "deploy"))
    try:
        import demo as module

        yield module
    finally:
        sys.path.remove(str(ROOT / "deploy"))


@pytest.fixture(scope="module")
def data(demo: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return demo.write_demo_data(tmp_path_factory.mktemp("data"))


def test_every_digit_is_either_learnt_or_held_out(demo: ModuleType, data: Any) -> None:
    held_out = {path.name for path in data.test_images()}
    learnt = {path.name for task in demo.DIGIT_TASKS for path in data.train(task).rglob("*.png")}
    assert len(held_out) == 599
    assert len(learnt) == 1797 - 599
    assert not held_out & learnt
    classes = [
        folder.name for task in demo.DIGIT_TASKS for folder in sorted(data.train(task).iterdir())
    ]
    assert classes == [f"digit_{digit}" for digit in range(10)]


def test_the_fourth_task_has_its_own_classes_and_images(demo: ModuleType, data: Any) -> None:
    for folder, count in ((data.shapes_train, 120), (data.shapes_test, 60)):
        assert sorted(shape.name for shape in folder.iterdir()) == ["cross", "triangle"]
        images = demo.images_in(folder / "cross")
        assert len(images) == count
        with Image.open(images[0]) as image:
            assert image.size == (8, 8)


def test_images_travel_as_a_form_does(demo: ModuleType, tmp_path: Path) -> None:
    import demo_processes

    images = [tmp_path / name for name in ("a.png", "b.png")]
    for image in images:
        image.write_bytes(b"\x89PNG\r\n" + image.name.encode())
    body = demo_processes.multipart(images, boundary="edge")
    message = BytesParser(policy=HTTP).parsebytes(
        b"Content-Type: multipart/form-data; boundary=edge\r\n\r\n" + body
    )
    parts = list(message.iter_parts())
    assert [part.get_filename() for part in parts] == ["a.png", "b.png"]
    assert [part.get_param("name", header="content-disposition") for part in parts] == ["files"] * 2
    assert [part.get_content() for part in parts] == [image.read_bytes() for image in images]


def test_a_taken_port_is_replaced_and_said(
    demo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert demo.free_port(port) != port
        assert f"Port {port} is taken" in capsys.readouterr().out


def test_a_second_demo_leaves_the_first_ones_store_alone(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with demo.fresh_folder():
        demo.STORE.mkdir()
        with pytest.raises(demo.DemoFailed, match="another demo"), demo.fresh_folder():
            pass
        assert demo.STORE.exists()
    with demo.fresh_folder():
        assert not demo.STORE.exists()


def test_a_process_is_stopped_even_if_it_will_not_listen(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import demo_processes

    monkeypatch.setattr(demo_processes, "STOP_S", 0.2)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ignoring', flush=True); time.sleep(60)"
    )
    process = demo_processes.start([sys.executable, "-c", deaf], stdout=-1)
    with demo_processes.stopping(process, signal.SIGTERM):
        assert process.stdout is not None
        process.stdout.readline()
    process.stdout.close()
    assert process.returncode == -signal.SIGKILL


def test_a_failing_trainer_ends_the_demo_with_its_reason(demo: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(demo.DemoFailed, match="missing-folder"):
        demo.train(
            "add-task", "--data", str(tmp_path / "missing-folder"),
            store=tmp_path / "models", log=tmp_path / "log",
        )  # fmt: skip
