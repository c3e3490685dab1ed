"""Run `dne-train` as a job of a Ray cluster: submit it, follow its output, end as it ends.

The laptop and the cluster speak JSON over HTTP. Nothing that the cluster sends is unpickled.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_store.cli.command import EXIT_FAILED, EXIT_NOT_PROMOTED, EXIT_OK, EXIT_USAGE
from model_store.errors import DneError, WrongUsage
from model_store.tables import counted

UPLOAD_BYTES = 256 << 20
"""Bytes of a folder at most that is uploaded: Ray keeps uploads in the memory of its head node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A command for a cluster."""

    words: tuple[str, ...]
    """The arguments of `dne-train`, without those that send it."""
    paths: Mapping[str, str]
    """Names of files as they were given, by the option that has each."""
    store: str
    upload: Path | None
    """A folder of data to send with the command."""
    name: str | None
    """The task's name, if one was given."""
    threads: int = 1
    gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entrypoint:
    """A shell line, the mark that its answer follows, and the folder to upload, if any."""

    line: str
    mark: str
    upload: Path | None = None


def make_entrypoint(sent: Sent) -> _Entrypoint:
    """Make the line that runs a command on the cluster."""
    words = ["dne-train", *sent.words]
    # The last one counts. A value may begin with a dash, hence the equals sign.
    for option, path in sent.paths.items():
        words.append(f"{option}={path if '://' in path else os.path.abspath(path)}")
    upload = None if sent.upload is None else _checked(sent.upload)
    if upload is not None:
        words += ["--data=.", f"--name={sent.name or upload.name}"]
    mark = f"dne-train-answer-{secrets.token_hex(16)}"
    line = f"answer=$({shlex.join(words)}); code=$?; "
    return _Entrypoint(
        line=f"{line}printf '%s\\n' {mark} \"$answer\"; exit $code", mark=mark, upload=upload
    )


def _checked(data: Path) -> Path:
    """Return the folder to upload, unless it is too large."""
    folder = data.resolve()
    if not folder.is_dir():
        raise WrongUsage(f"`data={data}` is not a folder of this machine: nothing to send")
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    if size > UPLOAD_BYTES:
        raise WrongUsage(
            f"`data={data}` has {counted(len(files), 'file')} of {size >> 20} MiB, and an upload "
            f"has {UPLOAD_BYTES >> 20} MiB at most: put the folder where the cluster reads it, and "
            "leave `ray_upload` out"
        )
    return folder


class JobOutput:
    """Output of a job, as it comes. A stream that begins again is not shown twice."""

    def __init__(self, *, mark: str) -> None:
        self._mark = mark
        self._text = ""
        self._skip = 0
        self._shown = 0
        self._answer_at: int | None = None

    def begin_again(self) -> None:
        """Expect the stream from its beginning."""
        self._skip = len(self._text)

    def take(self, text: str) -> Iterator[str]:
        """Take the next piece, and yield the lines of progress that it completes."""
        skipped = min(self._skip, len(text))
        self._skip -= skipped
        self._text += text[skipped:]
        while self._answer_at is None:
            end = self._text.find("\n", self._shown)
            if end < 0:
                return
            line = self._text[self._shown : end]
            self._shown = end + 1
            if line == self._mark:
                self._answer_at = self._shown
            else:
                yield line

    @property
    def answer(self) -> str:
        """The answer of the command, without the line break at its end."""
        return "" if self._answer_at is None else self._text[self._answer_at :].rstrip("\n")


_OWN_CODES = frozenset({EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_NOT_PROMOTED})
RECONNECTS = 5
PAUSE_S = 2.0
STOP_S = 20.0
"""Time for a job to end after it was told to."""
ENDED = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})


class JobFailed(DneError):
    """A job that ended without an exit code of its command, or cannot be followed."""


_JobClient = Any
"""Ray's JobSubmissionClient, which is imported when it is used."""


def run_on_ray(
    sent: Sent, *, address: str, connect: Callable[[str], _JobClient] | None = None
) -> int:
    """Submit the command and follow it. Print its answer and return its exit code."""
    client = (connect or _connect_to_ray)(address)
    entrypoint = make_entrypoint(sent)
    if "://" not in sent.store:
        _say(f"note: the cluster must see the store {sent.store} as the same folder")
    job = _submit(client, entrypoint, sent)
    _say(
        f"job {job} of {address}: Ctrl-C stops it; to follow it again: ray job logs --follow {job}"
    )
    output = JobOutput(mark=entrypoint.mark)
    try:
        _follow(client, job, output)
        code = _exit_code(client, job)
    except KeyboardInterrupt:
        _stop(client, job)
        raise
    if output.answer:
        print(output.answer)
    return code


def _connect_to_ray(address: str) -> _JobClient:
    """Connect to the dashboard of a cluster. WrongUsage if Ray is not installed here."""
    if not address.startswith(("http://", "https://")):
        raise WrongUsage(
            f"`ray_address={address}` is not the address of a dashboard: "
            "give one such as http://head-node:8265"
        )
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise WrongUsage("`on=ray` needs Ray here too: pip install 'dne-serve[ray]'") from error
    # Ray lets its variables win over an argument. The option must win over both.
    os.environ["RAY_API_SERVER_ADDRESS"] = address
    try:
        client = JobSubmissionClient(address)
    except Exception as error:  # of many kinds: no such host, no such route, a wrong token
        raise JobFailed(f"the Ray cluster {address} does not answer: {_reason(error)}") from error
    return client


def _submit(client: _JobClient, entrypoint: _Entrypoint, sent: Sent) -> str:
    # The history of the channel names the person who asked. The job ends as it would at Ctrl-C.
    variables = {"LOGNAME": _user(), "RAY_JOB_STOP_SIGNAL": "SIGINT"}
    environment: dict[str, Any] = {"env_vars": variables}
    if entrypoint.upload is not None:
        os.environ.setdefault("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "1")  # images are data
        environment["working_dir"] = str(entrypoint.upload)
    try:
        job: str = client.submit_job(
            entrypoint=entrypoint.line,
            runtime_env=environment,
            entrypoint_num_cpus=sent.threads,
            entrypoint_num_gpus=sent.gpus,
        )
    except Exception as error:
        raise JobFailed(f"the Ray cluster did not take the job: {_reason(error)}") from error
    return job


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid-{os.getuid()}"


def _follow(client: _JobClient, job: str, output: JobOutput) -> None:
    """Show the output of the job until it ends. A lost connection is made again."""
    for attempt in range(RECONNECTS + 1):
        try:
            asyncio.run(_show(client, job, output))
            return
        except Exception as error:
            if attempt == RECONNECTS:
                raise JobFailed(
                    f"lost sight of job {job}, which goes on: {_reason(error)}; to follow it: "
                    f"ray job logs --follow {job}"
                ) from error
            time.sleep(PAUSE_S)


async def _show(client: _JobClient, job: str, output: JobOutput) -> None:
    output.begin_again()
    async for text in client.tail_job_logs(job):
        for line in output.take(text):
            print(line, file=sys.stderr, flush=True)


def _exit_code(client: _JobClient, job: str) -> int:
    ended = _wait_for_end(client, job)
    code = getattr(ended, "driver_exit_code", None)
    if code in _OWN_CODES and _status(ended) != "STOPPED":
        return int(code)
    raise JobFailed(
        f"job {job} ended as {_status(ended)}: {getattr(ended, 'message', None) or 'no reason'}"
    )


def _wait_for_end(client: _JobClient, job: str) -> Any:
    end = time.monotonic() + STOP_S
    while _status(info := client.get_job_info(job)) not in ENDED:
        if time.monotonic() > end:
            raise JobFailed(f"job {job} is {_status(info)}; ask later: ray job status {job}")
        time.sleep(0.2)
    return info


def _status(info: Any) -> str:
    return str(getattr(info.status, "value", info.status))


def _stop(client: _JobClient, job: str) -> None:
    """Tell the job to end, and wait until it has."""
    _say(f"stopping job {job}; Ctrl-C again leaves it to Ray")
    try:
        client.stop_job(job)
        _say(f"job {job} has ended: {_status(_wait_for_end(client, job))}")
    except Exception as error:
        _say(f"job {job} may go on ({_reason(error)}); to stop it: ray job stop {job}")


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
