"""A job names the weights that a first task begins with."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_store.loop.claim import JobClaim
from model_store.loop.jobs import Jobs
from model_store.store.store import Store
from tests.tiny_versions import promote, publish_tiny
from tests.trainer.folders import asked
from trainer.loop import worker as worker_module
from trainer.loop.learn import FromInbox
from trainer.loop.worker import Worker
from trainer.progress import Silent
from trainer.request import AddTask, PretrainedFile


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[AddTask]:
    made: list[AddTask] = []

    def learn(request: AddTask, **others: object) -> FromInbox:
        made.append(request)
        return FromInbox(outcomes=())

    monkeypatch.setattr(worker_module, "learn_from_inbox", learn)
    return made


def run_job(store: Store, name: str) -> str:
    jobs = Jobs(store.objects)
    job = jobs.ask(channel="production", actor="tests", reason="", pretrained=name)
    request = asked(Path(store.location), Path("inbox"))
    worker = Worker(request, progress=Silent())
    claim = jobs.claim_next(channel="production", worker="tests")
    assert isinstance(claim, JobClaim)
    worker._run_safely(claim)
    end = jobs.job(job.id).end
    assert end is not None
    return f"{end.outcome}: {end.reason}"


def test_the_first_task_begins_with_them(tmp_path: Path, requests: list[AddTask]) -> None:
    store = Store.create(str(tmp_path / "models"))
    run_job(store, "facebook/dinov2-small")
    (request,) = requests
    assert request.pretrained == PretrainedFile(file=Path("facebook/dinov2-small"))


def test_a_later_task_does_not(tmp_path: Path, requests: list[AddTask]) -> None:
    """Another job was faster: the weights say nothing about what is there."""
    store = Store.create(str(tmp_path / "models"))
    promote(store, publish_tiny(store, tasks=[("animals", ["cat", "dog"])]))
    run_job(store, "dinov2-small")
    (request,) = requests
    assert request.pretrained is None


@pytest.mark.parametrize("name", ["weights.safetensors", "secret/weights"])
def test_a_file_of_the_worker_is_never_read(
    tmp_path: Path,
    requests: list[AddTask],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"x")
    store = Store.create(str(tmp_path / "models"))
    assert "no file of the worker's machine" in run_job(store, name)
    assert requests == []


def test_an_unknown_name_ends_the_job_in_words(tmp_path: Path, requests: list[AddTask]) -> None:
    store = Store.create(str(tmp_path / "models"))
    assert "did you mean dinov2-small" in run_job(store, "dinov2-smal")
