"""Define the routes of jobs: asking for one and cancelling it need the scope `admin`, reading them
needs `label`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request

from dne_serve.access.permission import Permission
from dne_serve.errors import Malformed
from dne_serve.http.openapi import problems
from dne_serve.http.scoped_route import FACTS, Parts, actor_of, json_only, needing
from dne_serve.loop.schemas import JobAnswer, JobBody, JobsAnswer, WaitingAnswer
from dne_serve.loop.trainer_child import BackboneAnswer
from dne_serve.server import Serving
from model_store.errors import NothingToLearn, StoreNotFound
from model_store.loop.describe import describe_job, describe_waiting
from model_store.loop.jobs import LEASE_S, Job, Jobs
from model_store.loop.waiting import WaitingLabels
from model_store.store.store import Store
from model_store.worth import proposal

DEFAULT_JOBS = 10
MAX_JOBS = 100
JobPath = Annotated[str, Path(max_length=100)]

reading_jobs = APIRouter(
    route_class=needing(Permission.LABEL),
    dependencies=[Depends(json_only)],
    responses=problems(400, 404, 503),
    tags=["jobs"],
)
asking_jobs = APIRouter(
    route_class=needing(Permission.ADMIN),
    dependencies=[Depends(json_only)],
    responses=problems(400, 404, 409, 415, 503),
    tags=["jobs"],
)


@reading_jobs.get("/jobs")
def list_jobs(
    serving: Parts,
    limit: Annotated[int, Query(ge=1, le=MAX_JOBS)] = DEFAULT_JOBS,
) -> JobsAnswer:
    """List the newest jobs of the served channel, and count the labels that wait. There are none
    before there is a store."""
    refused = serving.authorizer.why_closed(Permission.ADMIN, model=serving.name)
    try:
        store = serving.open_store()
    except StoreNotFound:
        nothing = WaitingAnswer(**describe_waiting(WaitingLabels()))
        known = _backbones(serving)
        return JobsAnswer(jobs=[], waiting=nothing, head=None, refused=refused, backbones=known)
    jobs = Jobs(store.objects, keys=store.keys)
    newest = jobs.of_channel(serving.settings.channel, limit=limit)
    waiting = describe_waiting(_labels_that_wait(serving, store))
    head = store.head(serving.settings.channel)
    return JobsAnswer(
        jobs=[_job_answer(jobs, job, store) for job in newest],
        waiting=WaitingAnswer(**waiting),
        head=head.target if head else None,
        pinned=head is not None and head.mode == "pin",
        refused=refused,
        backbones=[] if head else _backbones(serving),
    )


def _backbones(serving: Serving) -> list[BackboneAnswer]:
    return serving.trainer.backbones() if serving.trainer else []


@reading_jobs.get("/jobs/{job}")
def show_job(serving: Parts, job: JobPath) -> JobAnswer:
    """Show a job: its progress while it runs, and its verdict at the end."""
    store = serving.open_store()
    jobs = Jobs(store.objects, keys=store.keys)
    return _job_answer(jobs, jobs.job(job), store)


@asking_jobs.post("/jobs")
def ask_for_job(request: Request, serving: Parts, body: JobBody | None = None) -> JobAnswer:
    """Ask a worker to learn from the labels that wait, or to adapt the version that the channel
    names. `dne-train worker` takes the job."""
    store, asked = serving.open_store(), body or JobBody()
    _refuse_nothing_to_learn(serving, store, asked)
    jobs, channel = Jobs(store.objects, keys=store.keys), serving.settings.channel
    actor = actor_of(request)
    made = jobs.ask(
        channel=channel,
        actor=actor,
        reason=asked.reason,
        kind=asked.kind,
        pretrained=asked.pretrained,
    )
    request.scope[FACTS].update(job=made.id, kind=asked.kind, reason=asked.reason)
    return _job_answer(jobs, jobs.job(made.id), store)


@asking_jobs.post("/jobs/{job}/cancel")
def cancel_job(request: Request, serving: Parts, job: JobPath) -> JobAnswer:
    """Cancel a job. Its worker stops within seconds, and nothing is promoted."""
    store = serving.open_store()
    jobs = Jobs(store.objects, keys=store.keys)
    jobs.cancel(job, actor=actor_of(request))
    request.scope[FACTS].update(job=job)
    return _job_answer(jobs, jobs.job(job), store)


def _refuse_nothing_to_learn(serving: Serving, store: Store, asked: JobBody) -> None:
    has_version = store.head(serving.settings.channel) is not None
    if asked.pretrained is not None and (has_version or asked.kind == "grow"):
        raise Malformed("pretrained is for the first task: the network of this channel is there")
    if asked.kind == "learn-from-inbox":
        if not _labels_that_wait(serving, store).items:
            raise NothingToLearn("no label waits that can be learnt from; label images first")
        return
    head = store.head(serving.settings.channel)
    if head is None or proposal(store, store.resolve(head)) is None:
        raise NothingToLearn(
            "the version that the channel names has little to win by adapting, keeps too few "
            "images, or was adapted before; `dne-train deepen` adapts it all the same"
        )


def _labels_that_wait(serving: Serving, store: Store) -> WaitingLabels:
    return serving.inbox_handle.waiting_labels(store, channel=serving.settings.channel)


def _job_answer(jobs: Jobs, job: Job, store: Store) -> JobAnswer:
    is_dead = _seems_dead(job) and jobs.is_dead(job.state)
    return JobAnswer(**describe_job(job, store, is_dead=is_dead))


def _seems_dead(job: Job) -> bool:
    """Return whether the job looks dead by our own clock, so that the store's clock is worth a
    request."""
    newest = job.heartbeat or job.claim
    if job.end is not None or newest is None:
        return False
    age = datetime.now(UTC) - datetime.fromisoformat(newest.time)
    return abs(age.total_seconds()) > LEASE_S
