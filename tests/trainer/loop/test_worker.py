"""Workers that die, come back, are cancelled or meet each other: no job is promoted twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from model_store.errors import DataRejected, NothingToLearn
from model_store.loop.describe import describe_job
from model_store.loop.jobs import Jobs
from model_store.loop.waiting import version_path
from model_store.records.manifest import Manifest
from model_store.records.signing import Trust, new_signer, save_trust
from model_store.store.store import Store
from tests.model_store.drafts import prepare
from tests.trainer.command import Command
from tests.trainer.folders import Listening, asked
from tests.trainer.loop.labelled import label_pictures
from trainer.loop.learn import FromInbox
from trainer.loop.worker import Worker
from trainer.progress import Progress
from trainer.request import AddTask, Deepen, Effort
from trainer.versions.outcome import Outcome

STAGES = ["begun", "learning", "published", "noted", "promoted"]
TASK = "from the inbox"


class Killed(BaseException):
    """Ends a worker as a kill does: nothing of it runs any more."""


class FakeLearning:
    """Learns the one task that waits, as `learn_from_inbox` does, and acts at some stages."""

    def __init__(self, at: dict[str, Callable[[], None]] | None = None) -> None:
        self._at = at or {}
        self.runs = 0

    def __call__(
        self,
        request: AddTask,
        *,
        progress: Progress,
        but_used_by: Collection[int],
        on_published: Callable[[Manifest], None],
    ) -> FromInbox:
        self.runs += 1
        store = Store.open(request.store)
        head = store.head(request.channel)
        assert head is not None
        parent = store.resolve(head)
        self._reach("begun")
        if but_used_by or TASK in [task.name for task in parent.tasks]:
            raise NothingToLearn("no label waits")
        with progress.phase("learning", total=100) as phase:
            self._reach("learning")
            for _ in range(10):
                phase.advance(10)
        manifest = prepare(parent=parent, task=TASK).publish(store)
        self._reach("published")
        on_published(manifest)
        self._reach("noted")
        refused = store.channel(request.channel).promote_or_explain(
            manifest, head=head, actor="tests", reason=""
        )
        self._reach("promoted")
        return FromInbox(outcomes=(_outcome(manifest, parent, refused),))

    def _reach(self, stage: str) -> None:
        action = self._at.pop(stage, None)
        if action is not None:
            action()


class FakeGrowing(FakeLearning):
    """Grows the version that the channel names, as `deepen` does, and acts at some stages."""

    def grow(self, request: Deepen, *, progress: Progress) -> Outcome:
        asked: Any = request
        assert request.on_published is not None
        assert (request.kind, request.if_needed) == ("adapter", True)
        grown = self(asked, progress=progress, but_used_by=(), on_published=request.on_published)
        return grown.last


def _outcome(manifest: Manifest, parent: Manifest, refused: str | None) -> Outcome:
    nothing: Any = None
    return Outcome(
        manifest=manifest,
        parent=parent,
        promoted=refused is None,
        refused=refused,
        served=manifest.version if refused is None else None,
        forecast=nothing,
        seconds=0.0,
    )


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker counts as dead at once, and beats often."""
    monkeypatch.setattr("model_store.loop.jobs.LEASE_S", -1.0)
    monkeypatch.setattr("trainer.loop.worker.HEARTBEAT_S", 0.01)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.create(str(tmp_path / "models"))
    first = prepare().publish(store)
    store.promote(first.version, channel="production", actor="tests", reason="")
    return store


def ask(store: Store) -> str:
    return Jobs(store.objects).ask(channel="production", actor="tests", reason="").id


def work(store: Store, learn: Callable[..., FromInbox] | None = None) -> int:
    worker = Worker(asked(Path(store.location), Path("inbox")), progress=Listening())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("trainer.loop.worker.learn_from_inbox", learn or FakeLearning())
        worker.run(once=True, poll_s=0.01, stop=threading.Event())
    return worker.done


def told(store: Store, job: str) -> dict[str, Any]:
    return describe_job(Jobs(store.objects).job(job), store)


def promotions(store: Store) -> int:
    """Count the records that name a version with the task, which was in none before."""
    targets = [record.target for record in store.history("production")]
    return sum(TASK in [task.name for task in store.manifest(target).tasks] for target in targets)


def test_a_job_is_run_and_tells_its_verdict(store: Store) -> None:
    job = ask(store)
    assert work(store) == 1
    facts = told(store, job)
    assert (facts["state"], facts["before"]) == ("promoted", 1)
    (version,) = facts["versions"]
    assert (version["version"], version["promoted"], version["refused"]) == (2, True, None)
    assert version["delta_bytes"] > 0
    assert any("learning: 100 images" in line for line in facts["log"])
    assert work(store) == 0


@pytest.mark.parametrize("stage", STAGES)
def test_the_job_of_a_killed_worker_is_promoted_once(store: Store, stage: str) -> None:
    job = ask(store)

    def die() -> None:
        raise Killed

    with pytest.raises(Killed):
        work(store, FakeLearning({stage: die}))
    assert told(store, job)["state"] == "running"
    work(store)
    assert told(store, job)["state"] == "promoted"
    assert promotions(store) == 1
    lineage = version_path(store, store.resolve(store.history("production")[-1]))
    assert told(store, job)["versions"][-1]["version"] in lineage.numbers
    assert not store.verify().problems


def grow(store: Store, growing: FakeGrowing) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("trainer.loop.worker.deepen", growing.grow)
        work(store)


@pytest.mark.parametrize("stage", STAGES)
def test_a_job_to_grow_is_promoted_once_though_its_worker_was_killed(
    store: Store, stage: str
) -> None:
    job = Jobs(store.objects).ask(channel="production", actor="tests", reason="", kind="grow").id

    def die() -> None:
        raise Killed

    with pytest.raises(Killed):
        grow(store, FakeGrowing({stage: die}))
    grow(store, FakeGrowing())
    facts = told(store, job)
    assert (facts["kind"], facts["state"]) == ("grow", "promoted")
    assert promotions(store) == 1
    assert not store.verify().problems


@pytest.mark.parametrize("stage", STAGES)
def test_a_worker_that_comes_back_promotes_nothing(store: Store, stage: str) -> None:
    """Another worker takes the job over and ends it while this one is asleep."""
    job, other = ask(store), FakeLearning()
    work(store, FakeLearning({stage: lambda: _take_over(store, other)}))
    assert other.runs == 1
    assert told(store, job)["state"] == "promoted"
    assert promotions(store) == 1


def _take_over(store: Store, learn: FakeLearning) -> None:
    assert work(store, learn) == 1


def test_a_refused_version_is_not_learnt_again_by_the_next_worker(store: Store) -> None:
    """The first worker dies after a move of the channel has made its version a branch."""
    job = ask(store)

    def move_and_die() -> None:
        store.rollback(channel="production", to=1, actor="tests", reason="")
        raise Killed

    with pytest.raises(Killed):
        work(store, FakeLearning({"noted": move_and_die}))
    work(store)
    facts = told(store, job)
    assert facts["state"] == "refused"
    assert "pinned" in facts["said"]
    assert store.versions() == [1, 2]


def test_a_version_that_became_a_branch_is_not_promoted_by_the_next_worker(store: Store) -> None:
    job = ask(store)

    def overtake_and_die() -> None:
        theirs = prepare(parent=store.manifest(1), task="theirs").publish(store)
        store.promote(theirs.version, channel="production", actor="tests", reason="")
        raise Killed

    with pytest.raises(Killed):
        work(store, FakeLearning({"noted": overtake_and_die}))
    work(store)
    assert "is a branch" in told(store, job)["said"]
    assert promotions(store) == 0


def test_a_cancelled_job_stops_within_a_step_and_promotes_nothing(store: Store) -> None:
    job = ask(store)

    def cancel() -> None:
        Jobs(store.objects).cancel(job, actor="tests")
        time.sleep(0.1)  # some beats

    work(store, FakeLearning({"learning": cancel}))
    facts = told(store, job)
    # With the lease of this test the cancelling itself may end the job.
    assert facts["state"] == "cancelled"
    assert store.versions() == [1]


def test_a_job_cancelled_after_the_publish_is_not_promoted(store: Store) -> None:
    job = ask(store)
    cancel = {"published": lambda: Jobs(store.objects).cancel(job, actor="tests")}
    work(store, FakeLearning(cancel))
    assert told(store, job)["state"] == "cancelled"
    assert promotions(store) == 0


@pytest.mark.parametrize("error", [DataRejected("too few images"), RuntimeError("a fault")])
def test_a_fault_ends_the_job_and_not_the_worker(store: Store, error: Exception) -> None:
    job = ask(store)

    def fail() -> None:
        raise error

    work(store, FakeLearning({"begun": fail}))
    facts = told(store, job)
    assert facts["state"] == "failed"
    assert facts["said"] == (
        "too few images" if isinstance(error, DataRejected) else "an error (RuntimeError)"
    )
    ask(store)
    assert work(store) == 1


def test_a_job_record_of_a_later_format_is_left_to_other_workers(store: Store) -> None:
    job = ask(store)
    path = Path(store.location, "jobs", job, "job.json")
    path.chmod(0o600)
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":2'))
    assert work(store) == 0
    assert not list(path.parent.glob("claim*"))


def test_the_command_runs_the_jobs_that_wait(
    dne_train: Command, letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model_store.loop.jobs.LEASE_S", 20.0)
    quickly = partial(AddTask, effort=Effort(epochs=1), augment="light")
    monkeypatch.setattr("trainer.loop.worker.AddTask", quickly)
    dne_train.add(letters)
    label_pictures(dne_train.store, {"zebra": 4})
    store = Store.open(str(dne_train.store))
    job = ask(store)
    assert dne_train("worker", "--once", "--json", "--checkpoint", letters.parent / "kept") == 0
    assert dne_train.out.strip() == '{"jobs": 1}'
    facts = told(store, job)
    assert facts["state"] == "promoted", facts
    assert facts["versions"][0]["new_classes"] == ["zebra"]
    assert facts["actor"] == "tests"
    assert dne_train("worker", "--once", "--poll-seconds", 0) == 2


def test_a_worker_that_signs_never_forces(dne_train: Command, tmp_path: Path) -> None:
    public = new_signer(tmp_path / "key.pem").public
    save_trust(tmp_path / "trust.json", Trust({"ann": public}))
    keys = ("--sign", tmp_path / "key.pem", "--trust", tmp_path / "trust.json")
    assert dne_train("worker", "--once", "--force", *keys) == 2
    assert "add-task --from-inbox --force" in dne_train.err
    assert dne_train("worker", "--once", *keys) == 0
