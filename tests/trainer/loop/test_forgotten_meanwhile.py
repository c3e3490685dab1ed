"""A class that is forgotten while a run learns it is in no version, and nothing is left of it."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from model_store.errors import PicturesGone
from model_store.loop.jobs import Jobs
from model_store.maintenance.forget import forget_class
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.trainer.folders import SHAPE, Listening, asked, write_classes
from tests.trainer.loop.labelled import inbox_of, label_pictures
from trainer.add_task import add_task
from trainer.loop.learn import learn_from_inbox
from trainer.loop.worker import Worker
from trainer.progress import Phase
from trainer.request import AddTask, NetworkShape


class Acting(Listening):
    """Acts once, when a phase begins."""

    def __init__(self, phase: str, act: Callable[[], object]) -> None:
        super().__init__()
        self._phase, self._act = phase, act

    @contextmanager
    def phase(self, name: str, *, total: int) -> Iterator[Phase]:
        if name == self._phase:
            self._phase = ""
            self._act()
        with super().phase(name, total=total) as phase:
            yield phase


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learnt")
    data = write_classes(folder / "letters", ["a", "b"])
    add_task(asked(folder / "models", data, shape=SHAPE), progress=Listening())
    return folder / "models"


@pytest.fixture
def store(learnt: Path, tmp_path: Path) -> Path:
    shutil.copytree(learnt, tmp_path / "models")
    return tmp_path / "models"


def forget(store: Path, name: str) -> None:
    forget_class(Store.open(str(store)), name, actor="tests", reason="")


def bytes_of(*folders: Path) -> bytes:
    found = [one for folder in folders for one in folder.rglob("*") if one.is_file()]
    return b"\n".join(str(one).encode() + one.read_bytes() for one in found)


def request_for(store: Path, **more: object) -> AddTask:
    return asked(store, Path("inbox"), **{"shape": NetworkShape(), **more})


@pytest.mark.parametrize("phase", ["reading images", "learning", "judging", "publishing"])
def test_a_run_that_learns_a_forgotten_class_publishes_nothing(
    store: Path, tmp_path: Path, phase: str
) -> None:
    label_pictures(store, {"alice": 12})
    progress = Acting(phase, lambda: forget(store, "alice"))
    request = request_for(store, checkpoint=tmp_path / "kept")
    with pytest.raises(PicturesGone, match="of the inbox that this run learns from"):
        learn_from_inbox(request, progress=progress)
    assert Store.open(str(store)).versions() == [1]
    assert b"alice" not in bytes_of(store, tmp_path / "kept")


def test_a_version_that_was_published_at_the_same_moment_is_deleted(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = label_pictures(store, {"alice": 12})
    pictures = [inbox_of(store).picture(inbox_of(store).item(one)) for one in ids]
    publish = Store.publish

    def forgetting(self: Store, *given: object, **more: object) -> Manifest:
        forget(store, "alice")
        return publish(self, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "publish", forgetting)
    with pytest.raises(PicturesGone):
        learn_from_inbox(request_for(store), progress=Listening())
    opened = Store.open(str(store))
    assert opened.versions() == [1]
    assert opened.verify().problems == ()
    left = bytes_of(store / "shards")
    assert not any(picture in left for picture in pictures)


def test_images_of_the_memory_that_are_forgotten_stop_a_run_that_repeats_them(
    store: Path, tmp_path: Path
) -> None:
    data = write_classes(tmp_path / "more", ["c", "d"])
    progress = Acting("judging", lambda: forget(store, "a"))
    with pytest.raises(PicturesGone, match="forgotten meanwhile"):
        add_task(asked(store, data, shape=NetworkShape()), progress=progress)
    assert Store.open(str(store)).versions() == [1]
    assert add_task(asked(store, data, shape=NetworkShape()), progress=Listening()).promoted


def test_a_job_whose_pictures_are_gone_fails_and_its_log_names_nobody(store: Path) -> None:
    label_pictures(store, {"alice": 12})
    jobs = Jobs(Store.open(str(store)).objects)
    job = jobs.ask(channel="production", actor="tests", reason="").id
    progress = Acting("judging", lambda: forget(store, "alice"))
    worker = Worker(request_for(store), progress=progress)
    worker.run(once=True, poll_s=0.01, stop=threading.Event())
    end = jobs.job(job).end
    assert end is not None
    assert (end.outcome, end.log) == ("failed", ())
    assert "deleted meanwhile" in end.reason
    assert b"alice" not in bytes_of(store)


def test_a_version_of_a_dead_worker_is_not_promoted_if_its_pictures_are_gone(store: Path) -> None:
    label_pictures(store, {"alice": 12})
    jobs = Jobs(Store.open(str(store)).objects, store_clock=lambda objects: 1e12)
    jobs.ask(channel="production", actor="tests", reason="")
    claim = jobs.claim_next(channel="production", worker="dead")
    assert claim is not None

    def die(manifest: Manifest) -> None:
        claim.made(manifest.version)
        raise KeyboardInterrupt

    with pytest.raises(BaseException, match="published just before"):
        learn_from_inbox(request_for(store), progress=Listening(), on_published=die)
    forget(store, "alice")
    opened = Store.open(str(store))
    assert opened.versions() == [1, 2]
    worker = Worker(request_for(store), progress=Listening())
    made = worker._finish(opened, 2)
    assert not made.promoted
    assert made.refused is not None
    assert "deleted meanwhile" in made.refused
    assert opened.versions() == [1]
    assert not worker._finish(opened, 2).promoted


def test_pictures_of_the_inbox_are_not_written_to_temporary_files(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed worker cannot leave what it never wrote."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    label_pictures(store, {"alice": 12})
    seen: list[Path] = []
    progress = Acting("learning", lambda: seen.extend(temporary.rglob("*.png")))
    learn_from_inbox(request_for(store), progress=progress)
    assert progress._phase == ""
    assert not seen
